"""`m4 new`: a folder of sentence pairs -> a complete gin file for it."""
