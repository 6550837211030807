"""Rules that treat a weight as a matrix: Muon, SOAP, GaLore."""
