"""m4: massively multilingual mixture-of-experts translation, from text to per-language ΔBLEU."""
