"""Settings of Sphinx for the site; docs/site/build.py writes the sources and runs it.

Nothing here may cause a request to another host: fonts are the system's, search is a script of the site.
"""

import os

project = "Rackloom"
version = release = os.environ["RACKLOOM_SITE_VERSION"]
author = "Rackloom maintainers"
copyright = "Rackloom maintainers. Apache-2.0"
root_doc = "index"
language = "en"

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_block"]
myst_heading_anchors = 6
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = False
highlight_language = "none"

html_theme = "furo"
html_title = "Rackloom"
html_static_path = [os.environ["RACKLOOM_SITE_STATIC"]]
html_css_files = ["site.css"]
templates_path = [os.environ["RACKLOOM_SITE_TEMPLATES"]]
html_show_sphinx = False
html_copy_source = False
html_permalinks_icon = "#"
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
_MONOSPACE = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
html_theme_options = {
    "light_css_variables": {"font-stack": _FONT, "font-stack--monospace": _MONOSPACE},
}
