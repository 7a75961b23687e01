"""`m4 plan`: an experiment compiled for machines that are not there: what fits, what it costs."""
