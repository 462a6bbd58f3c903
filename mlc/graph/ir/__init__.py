"""Small helpers on Relax and TIR that passes share."""
