"""Admission of claims and pods, and the controller that opens the gates which admission adds.

`webhook` answers AdmissionReviews (`reviews`) by the rules of `channel_pods` and its own, and caches its
reads of the cluster. `gates` opens gates later, from the same cache. `serving_certificate` issues the
webhook's certificate, under another account.
"""
