// The page over the past. The live page does not load this module.

export function startPast() {
  return {};
}
