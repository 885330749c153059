"""CEL as Kubernetes configures it for device selectors: compile once, evaluate on many devices.

`compiler.compile_selector` runs these stages:

1. `parse`: Google's CEL parser reads the text. Macros that it does not know are expanded on the
   tree (`syntax`).
2. `check`: types and overloads (`types`, `environment`, `library`), constant folding, literal
   validation.
3. `cost`, `call_costs`: the worst-case cost, by which the API server admits or refuses an expression.
4. `interpret`, `runtime`: the exact evaluator, one closure per node, with upstream's run-time cost.
5. `generate`: Python functions that answer without keeping count of cost. They defer to the exact
   evaluator wherever anything is out of the ordinary.

A selector is true, false, or fails. `CompileError` means that it is no valid expression for devices.
`EvaluationError` means that it has no answer for one device.
"""
