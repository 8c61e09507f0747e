"""Files in, a published corpus out: the offline half of Draftloom. Never runs while serving.

    walk.py      which files there are, and which are left alone, with the reason
    filter.py    which of them hold text worth drafting from, and that text
    build.py     tokenize, write through `retriever.format`, publish
    catalog.py   SQLite: which corpora there are, whose, and which version is active
    cli.py upkeep.py terminal.py      `draftloom corpus ...`: its commands, and how they talk

Nothing is skipped without a reason (`decisions.Reason`), and nothing is active before it is complete.
Importing this package imports nothing heavy.
"""
