"""Translation of files of text: their lines, in order, into files that appear whole."""
