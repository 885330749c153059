"""Admission of claims and pods, and the controller that opens the gates which admission adds.

`webhook` answers AdmissionReviews by the rules of `channel_pods` and its own; `gates` opens gates
later; `cache` is what both know of the cluster; `serving_certificate` issues the webhook's certificate.
"""
