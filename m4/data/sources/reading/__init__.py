"""What sources share: files of a folder by pattern, lines and records read as pairs."""
