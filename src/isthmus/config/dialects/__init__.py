"""What other programs' settings mean here."""
