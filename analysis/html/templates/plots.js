// Gives the plots the colours of the page. They are in shadow trees, which the style sheets of a page do not reach.
{
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(document.getElementById("plots-style").textContent);
  const attachShadow = Element.prototype.attachShadow;
  Element.prototype.attachShadow = function (options) {
    const root = attachShadow.call(this, options);
    root.adoptedStyleSheets.push(sheet);
    return root;
  };
  // Paper is not as wide as the window, and plots are not drawn again for it: they are scaled.
  const paper = 695;  // A4 within its margins, in CSS pixels
  addEventListener("beforeprint", () => {
    for (const { style, clientWidth, clientHeight } of document.querySelectorAll(".plot")) {
      style.setProperty("--width", `${clientWidth}px`);
      style.setProperty("--height", `${clientHeight}px`);
      style.setProperty("--scale", paper / clientWidth);
    }
  });
}
