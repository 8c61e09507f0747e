"""Files in, a published corpus out: the offline half of Draftloom. Never runs while serving.

    inputs/      what can be indexed: folders, git revisions, archives, JSON lines, Parquet; one file a kind
    walk.py git.py                    which files a folder has, and which are left alone, with the reason
    filter.py secrets.py licences.py  which of them hold text worth drafting from, and that text
    survey.py similar.py estimate.py  all of this for some sources: what a build would take; copies; how large it would be
    build.py     tokenize, write through `retriever.format`, publish
    catalog.py   SQLite: which corpora there are, whose, and which version is active
    cli.py upkeep.py terminal.py      `draftloom corpus ...`: its commands, and how they talk

Nothing is skipped without a reason (`decisions.Reason`), and nothing is active before it is complete.
Importing this package imports nothing heavy.
"""
