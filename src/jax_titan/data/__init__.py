"""Text in, batches out: a corpus becomes a token store once, and a batch is a pure function of (seed, step).

Read in this order: `corpus` (files to documents), `tokenizer` (documents to tokens), `store` (tokens on disk,
built once), `text` (a step's packed batch). `errors` and `progress` are what the command line shows of it.
"""
