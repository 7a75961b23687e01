"""m4: massively multilingual mixture-of-experts translation, from a seqio mixture to per-language ΔBLEU."""
