"""The jobs of `m4 data`: inspect the corpus; nothing is trained, no accelerator starts.

Each takes the experiment and, by name, the options that `m4.cli.data_arguments` declares for it.
"""
