"""The conformance suite of dspark: see README.md in this folder for what a green run means."""
