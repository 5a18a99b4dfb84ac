"""A GFlowNet that builds molecules of fragments: what can be built, who decides, and what a molecule is worth."""
