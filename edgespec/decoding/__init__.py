"""The core: what a port to another language mirrors.  It imports itself, ``formulas``, ``errors`` and numpy.

Read it in this order: ``loop`` (a round: propose, pass, verify, commit), ``drafter`` (what is guessed, ten hooks),
``verify`` (which guesses are accepted), and one drafter, such as ``drafters/speculative.py``.
"""
