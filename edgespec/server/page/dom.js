// Elements made of names, properties and children. Text is always text: nothing here parses HTML.

export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function button(text, action, properties = {}) {
  return el("button", { type: "button", onclick: action, ...properties }, text);
}

export const byId = (id) => document.getElementById(id);

// Whether a key press is the Enter that sends. While an input method composes (Korean, Japanese, Chinese), Enter
// belongs to
// it: isComposing is true. If composition has just ended before the key (Safari), the key code is 229.
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}

// Copies a text, and confirms on the button for a moment. Browsers have no clipboard for pages that another machine
// serves
// without encryption. There the text is copied from a selection.
export async function copy(text, pressed) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {
    const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    pressed.focus();
  }
  const said = pressed.textContent;
  if (said === "Copied") return;
  pressed.textContent = "Copied";
  setTimeout(() => (pressed.textContent = said), 2000);
}
