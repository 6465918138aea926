"""The webhook itself: AdmissionReviews over HTTP, its certificates, and what it reads of the cluster."""
