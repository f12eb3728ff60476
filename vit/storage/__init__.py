"""What everything stands on: files, locks, buckets, folders, output and the machine."""
