"""The core: what a port to another language mirrors.  It imports itself, ``formulas``, ``errors`` and numpy.

Read it in this order: ``loop`` (a round: propose, pass, verify, commit), ``proposal`` (what is guessed), ``verify``
(which guesses are accepted), ``drafter`` (ten hooks), and one drafter, such as ``drafters/speculative.py``.
"""
