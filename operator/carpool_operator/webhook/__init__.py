"""The webhook: AdmissionReviews over HTTP, its certificates, and the cluster objects that it reads."""
