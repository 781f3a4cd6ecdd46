"use strict";
// Elements: how they are found and made. Text only ever becomes textContent, so that nothing a model says is markup.

const at = id => document.getElementById(id);

/** A new element. Names with a dash, and `role`, are attributes; the others are properties. */
function make(tag, named = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(named)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

const percent = share => (100 * share).toFixed(1) + " %";
