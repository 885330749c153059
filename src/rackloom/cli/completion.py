"""`rackloom completion`: the script with which a shell completes commands, options, values and names.

cyclopts makes it from the commands. It does not contain the names of a tenant's objects: the script calls
`rackloom` for those, which requests them from the site.
"""

from typing import Literal

from rackloom.cli.common import with_common_flags


@with_common_flags
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the completion script for a shell.

    bash: `rackloom completion bash > ~/.local/share/bash-completion/completions/rackloom`.
    zsh: `rackloom completion zsh > DIRECTORY/_rackloom`, for a directory of `$fpath`.
    fish: `rackloom completion fish > ~/.config/fish/completions/rackloom.fish`.

    Parameters
    ----------
    shell
        The shell that reads it.
    """
    from rackloom.cli.main import app

    print(app.generate_completion(shell=shell), end="")
