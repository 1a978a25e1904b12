"""The core: what a port to another language mirrors.  It imports itself, ``formulas``, ``errors`` and numpy.

Read it in this order: ``proposal`` (what is guessed), ``loop`` (rounds), ``verify`` (which guesses stand), and one
drafter, such as ``drafters/medusa.py``.  ``observer`` keeps clocks and counters, ``guard`` what a drafter may break.
"""
