"use strict";
// The page's script. Texts of a run become text nodes only: nothing here parses HTML.
(() => {
  const find = (id) => document.getElementById(id);
  const read = (id) => JSON.parse(find(id).textContent);
  if (!find("steps")) return;

  const steps = read("steps");
  const choice = { step: find("step"), group: find("group"), colour: find("colour") };
  let groups = [];
  // Number of the open completion in its group.
  let opened = 0;

  function make(tag, text, name) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  }

  // A list whose values are all equal is a single number.
  function at(values, index) {
    if (values === null || values === undefined) return null;
    return Array.isArray(values) ? values[index] : values;
  }

  function valueOf(row, index, colour) {
    if (colour !== "gap") return at(row[colour], index);
    const old = at(row.old_log_probs, index);
    const rollout = at(row.rollout_log_probs, index);
    return old === null || rollout === null ? null : rollout - old;
  }

  function largest(colour) {
    let most = 0;
    for (const group of groups)
      for (const row of group.rows)
        for (let i = 0; i < row.texts.length; i++)
          if (row.mask[i] === "1") most = Math.max(most, Math.abs(valueOf(row, i, colour) ?? 0));
    return most;
  }

  function paint(token, value, scale, colour) {
    if (value === null || !scale || !value) return;
    const kind = colour === "entropy" ? "--amount" : value > 0 ? "--plus" : "--minus";
    const share = Math.min(1, Math.abs(value) / scale);
    token.style.backgroundColor = `rgba(var(${kind}), ${(0.75 * share).toFixed(3)})`;
  }

  function tokensOf(row, scale, colour, onSelect) {
    const line = make("div", undefined, "tokens");
    row.texts.forEach((text, index) => {
      const outside = row.mask[index] === "0";
      const token = make("span", text, outside ? "token outside" : "token");
      if (!outside) paint(token, valueOf(row, index, colour), scale, colour);
      if (onSelect) token.addEventListener("click", () => onSelect(token, index));
      line.append(token);
    });
    return line;
  }

  const number = (value) => (value === null ? "not known" : Number(value.toPrecision(4)).toString());

  function about(row) {
    const parts = [row.correct ? "correct" : "not correct", `${row.texts.length} tokens`];
    parts.push(row.finish_reason);
    if (!row.learned) parts.push("not learned from");
    return parts.join(" · ");
  }

  function list(entries) {
    const found = make("dl");
    for (const [name, value] of entries) found.append(make("dt", name), make("dd", value));
    return found;
  }

  function detailsOf(row, index) {
    return list([
      ["token", `${index}: ${JSON.stringify(row.texts[index])}`],
      ["advantage", number(valueOf(row, index, "advantages"))],
      ["log-prob, rollout", number(valueOf(row, index, "rollout_log_probs"))],
      ["log-prob, old policy", number(valueOf(row, index, "old_log_probs"))],
      ["gap", number(valueOf(row, index, "gap"))],
      ["log-prob, reference", number(valueOf(row, index, "ref_log_probs"))],
      ["entropy", number(valueOf(row, index, "entropy"))],
      ["weight version", String(at(row.versions, index))],
      ["in the loss", row.mask[index] === "1" ? "yes" : "no"],
    ]);
  }

  function open(row, card, scale, colour) {
    opened = groups[choice.group.selectedIndex].rows.indexOf(row);
    for (const other of find("cards").children) other.classList.toggle("open", other === card);
    const one = find("one");
    const details = make("div");
    one.replaceChildren();
    one.append(make("h3", `Completion ${row.sample}: reward ${number(row.reward)}`));
    one.append(make("p", about(row)));
    one.append(
      tokensOf(row, scale, colour, (token, index) => {
        for (const other of one.querySelectorAll(".selected")) other.classList.remove("selected");
        token.classList.add("selected");
        details.replaceChildren(detailsOf(row, index));
      }),
      details,
    );
    const entries = Object.entries(row.parts).map(([name, value]) => [name, number(value)]);
    if (row.shaped_reward !== row.reward)
      entries.push(["reward with the overlong penalty", number(row.shaped_reward)]);
    if (row.found_answer !== null) entries.push(["answer found", row.found_answer]);
    for (const call of row.tool_calls) entries.push(["tool call", call.call], ["result", call.result]);
    if (row.error) entries.push(["error", row.error]);
    one.append(list(entries));
    if (row.texts.length) details.append(make("p", "Select a token for its numbers."));
  }

  function showGroup() {
    const group = groups[choice.group.selectedIndex];
    const colour = choice.colour.value;
    const scale = largest(colour);
    const words = { advantages: "advantage", gap: "gap in nats", entropy: "entropy in nats" };
    find("legend").textContent =
      scale === 0
        ? `No ${words[colour]} is known, or all are 0.`
        : colour === "entropy"
          ? `Purple: ${words[colour]}, up to ${number(scale)} in this step.`
          : `Blue: positive ${words[colour]}, orange: negative, up to ±${number(scale)} in this step.`;
    find("prompt").querySelector("pre").textContent =
      group.prompt + (group.answer === null ? "" : `\n\nexpected answer: ${group.answer}`);
    const cards = group.rows.map((row) => {
      const card = make("div", undefined, "card");
      const button = make("button", "Open");
      button.addEventListener("click", () => open(row, card, scale, colour));
      card.append(make("h3", `${row.sample}: reward ${number(row.reward)}`));
      card.append(make("p", about(row)), tokensOf(row, scale, colour), button);
      return card;
    });
    find("cards").replaceChildren(...cards);
    open(group.rows[opened], cards[opened], scale, colour);
  }

  function showStep() {
    groups = read(`step-${choice.step.value}`);
    choice.group.replaceChildren(
      ...groups.map((group) => {
        const mean = group.rows.reduce((sum, row) => sum + row.reward, 0) / group.rows.length;
        const name = group.problem.split("/").pop();
        return make("option", `${name}, mean reward ${number(mean)}`);
      }),
    );
    // Completions with different rewards say more than equal ones.
    const differ = groups.findIndex((g) => g.rows.some((row) => row.reward !== g.rows[0].reward));
    choice.group.selectedIndex = Math.max(0, differ);
    showOther();
  }

  function showOther() {
    opened = 0;
    showGroup();
  }

  choice.step.append(...steps.map((step) => make("option", String(step))));
  choice.step.selectedIndex = steps.length - 1;
  choice.step.addEventListener("change", showStep);
  choice.group.addEventListener("change", showOther);
  choice.colour.addEventListener("change", showGroup);
  showStep();
})();
