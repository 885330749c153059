"""The checks of the doctor, one module per subject: functions from a snapshot or evidence to findings.

To add a check, give it a name in `catalogue` (with the checks that it explains), write a function that
yields findings with the evidence of both sides and a command that fixes the fault, and call it in
`examination`.
"""
