"""Sliders for chapters: bind a plain function, which a cell or a test can call too, to something to drag."""
import ipywidgets


def play(function, **ranges):
    """Sliders above the text that `function` makes of their values, renewed at every move.

    function(**values) -> HTML text. ranges: a name's (first, last, start) of whole numbers, or a list of values to
    choose from, starting with the first. Returns (box to show, {name: slider}, the HTML widget).
    """
    sliders = {
        name: ipywidgets.SelectionSlider(options=r, value=r[0], description=name) if isinstance(r, list)
        else ipywidgets.IntSlider(min=r[0], max=r[1], value=r[2], description=name)
        for name, r in ranges.items()
    }
    text = ipywidgets.HTML()

    def renew(_=None):
        text.value = function(**{name: slider.value for name, slider in sliders.items()})

    for slider in sliders.values():
        slider.observe(renew, "value")
    renew()
    return ipywidgets.VBox([*sliders.values(), text]), sliders, text
