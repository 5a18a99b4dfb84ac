// Multiples of the baseline with 95 % intervals, as the report computes them: on logarithms, paired by seed where each
// side has each seed once, else Welch's; the scale errors of two cards and time without readings join them in
// quadrature. One thing differs: from 20 repeats on the report draws a bootstrap, and the page keeps Student's t.
(() => {
  "use strict";
  const { report } = window.view;
  const steps = report.t_by_inverse_degrees;

  // Student's t for any degrees of freedom from 1 on, between the values the page was given.
  function t(degrees) {
    const place = (steps.length - 1) / degrees;
    const below = Math.min(Math.floor(place), steps.length - 2);
    return steps[below] + (place - below) * (steps[below + 1] - steps[below]);
  }

  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const variance = (values) => {
    const middle = mean(values);
    return values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1);
  };
  const unique = (runs) => new Set(runs.map((run) => run.seed)).size === runs.length;

  function pairsOf(ours, theirs) {
    if (ours.length === 1 && theirs.length === 1) return [[ours[0], theirs[0]]];
    if (!unique(ours) || !unique(theirs)) return [];
    const bySeed = new Map(theirs.map((run) => [run.seed, run]));
    return ours.filter((run) => bySeed.has(run.seed)).map((run) => [run, bySeed.get(run.seed)]);
  }

  function paired(pairs) {
    const logs = pairs.map(([a, b]) => Math.log(a.joules / b.joules));
    if (logs.length < 2) return [mean(logs), Infinity];
    return [mean(logs), t(logs.length - 1) * Math.sqrt(variance(logs) / logs.length)];
  }

  function welch(ours, theirs) {
    const logs = [ours, theirs].map((side) => side.map((run) => Math.log(run.joules)));
    const middle = mean(logs[0]) - mean(logs[1]);
    if (logs.some((side) => side.length < 2)) return [middle, Infinity];
    const errors = logs.map((side) => variance(side) / side.length);
    const spread = errors.reduce((sum, error, k) => sum + error ** 2 / (logs[k].length - 1), 0);
    const both = errors[0] + errors[1];
    return [middle, both > 0 ? t(both ** 2 / spread) * Math.sqrt(both) : 0];
  }

  // [value, low, high, repeats], or null where joules are missing; each run is {seed, joules, devices, gain, missing}.
  function ratio(ours, theirs) {
    const pairs = pairsOf(ours, theirs);
    const sides = pairs.length ? [0, 1].map((side) => pairs.map((pair) => pair[side])) : [ours, theirs];
    if (sides.some((side) => !side.length || side.some((run) => !(run.joules > 0 && run.joules < Infinity)))) return null;
    let [middle, half] = pairs.length ? paired(pairs) : welch(ours, theirs);
    const lacking = sides.map((side) => Math.log1p(Math.max(...side.map((run) => run.missing))) ** 2);
    half = Math.sqrt(half ** 2 + lacking[0] + lacking[1]);
    const cards = sides.map((side) => Array.from(new Set(side.flatMap((run) => run.devices))).sort().join());
    if (cards[0] !== cards[1]) {
      const scale = sides.map((side) => Math.log1p(Math.max(...side.map((run) => run.gain))) ** 2);
      half = Math.sqrt(half ** 2 + scale[0] + scale[1]);
    }
    return [...[middle, middle - half, middle + half].map(Math.exp), Math.min(sides[0].length, sides[1].length)];
  }

  window.view.ratio = ratio;
  // Why a ratio is inconclusive, in the words of the tables; empty where it is significant.
  window.view.doubtWords = (found, crowded) => {
    if (!found) return "";
    const [, low, high, repeats] = found;
    if (crowded) return "\ninconclusive\n(others used\nthe cores)";
    if (low > 1 || high < 1) return "";
    return repeats > 1 ? "\ninconclusive\n(n=" + repeats + ")" : "\none seed";
  };
  // Ends that are open, or around 1 and more than two orders of magnitude apart, are not shown.
  const saysNothing = (low, high) => !Number.isFinite(high) || !(low > 0) || (low <= 1 && high >= 1 && high / low > 100);
  window.view.ratioWords = (found) => {
    if (!found) return "-";
    const [value, low, high] = found;
    const decimals = (size) => (size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3);
    const digits = decimals(value);
    const end = (one) => one.toFixed(one < 0.5 * 10 ** -digits ? Math.max(digits, 3) : Math.min(digits, decimals(one)));
    return value.toFixed(digits) + "x" + (saysNothing(low, high) ? "" : " [" + end(low) + ", " + end(high) + "]");
  };
})();
