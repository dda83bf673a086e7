// Unpacks plotly, which lies in this page, and draws the figures in the colors of the page.
"use strict";
(async () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const places = [...document.querySelectorAll(".plot")];

  async function unpack(element) {
    const packed = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // Figures name the page's CSS variables where a color goes.
  function colored(value, key, styles) {
    if (typeof value === "string") {
      return /color$/.test(key) && value.startsWith("--")
        ? styles.getPropertyValue(value).trim()
        : value;
    }
    if (Array.isArray(value)) return value.map((item) => colored(item, key, styles));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([name, item]) => [name, colored(item, name, styles)]),
    );
  }

  async function draw() {
    const styles = getComputedStyle(document.documentElement);
    // Where a finger scrolls the page, it must not zoom the plot.
    const fixedrange = matchMedia("(pointer: coarse)").matches;
    for (const place of places) {
      const { data, layout } = colored(figures[place.dataset.figure], "", styles);
      layout.font.family = getComputedStyle(document.body).fontFamily;
      layout.xaxis.fixedrange = layout.yaxis.fixedrange = fixedrange;
      await Plotly.react(place, data, layout, {
        responsive: true,
        displaylogo: false,
        displayModeBar: fixedrange || place.clientWidth < 600 ? false : "hover",
        modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
        toImageButtonOptions: { filename: place.dataset.figure },
      });
      place.classList.remove("waiting");
    }
  }

  try {
    if (places.length) {
      const script = document.createElement("script");
      script.textContent = await unpack(document.getElementById("plotly"));
      document.head.append(script);
      await draw();
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    }
    document.documentElement.dataset.drawn = Math.round(performance.now());
  } catch (error) {
    for (const place of places) {
      place.classList.remove("waiting");
      place.textContent = `The plot cannot be drawn: ${error}.`;
    }
    document.documentElement.dataset.failed = String(error);
  }
})();
