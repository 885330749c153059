"""One plan, many schedulers: what each has to be told so that it places the job as planned. Pure."""
