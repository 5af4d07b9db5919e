"""Which training examples matter, and what tangent kernels say of fine-tuning: claims of papers on language models."""
