"""Classification of texts and images: from labels and from a teacher's responses, features and relations."""
