"""Charts drawn as SVG text, without a plotting library: for files, pages and reports.

A ``Chart`` is data: two axes and the marks on them. ``draw`` renders it as one SVG element,
``draw_panels`` several charts in a grid. Equal charts give equal bytes.

>>> from affidavit.certificate.charts import Axis, Chart, Line, draw
>>> curve = Line(name="ε = 1/σ", points=((0.5, 2.0), (1.0, 1.0), (2.0, 0.5)))
>>> chart = Chart(title="Cost", x=Axis(label="σ"), y=Axis(label="ε (nats)"), marks=(curve,))
>>> draw(chart).startswith("<svg ")
True
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
