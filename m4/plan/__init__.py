"""`m4 plan`: ahead-of-time compilation for accelerators that need not be present."""
