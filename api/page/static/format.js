// Numbers with units and separators, ages, and times in the reader's zone.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const oneDigit = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const dayAndClock = new Intl.DateTimeFormat(undefined, {
  month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false,
});

/** 41200 -> "41,200" */
export const count = (number) => whole.format(number);

/** 12.34 -> "12.3", 1234 -> "1,234" */
export const rate = (number) => (number < 100 ? oneDigit : whole).format(number);

/** 1 -> "1 page", 41200 -> "41,200 pages" */
export const counted = (number, noun, plural = `${noun}s`) => `${count(number)} ${number === 1 ? noun : plural}`;

/** 0.25 -> "25%" */
export const percent = (share) => `${oneDigit.format(100 * share)}%`;

/** Seconds -> "0.2 s", "42 s", "12 min", "3 h", "2 d" */
export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${count(s / 86400)} d`;
}

/** Seconds since 1970 -> an ISO time in UTC, to the millisecond. */
export const utc = (seconds) => new Date(seconds * 1000).toISOString();

/** Seconds since 1970 -> the time of the day in the reader's zone, with the date if it is not today. */
export function localTime(seconds) {
  const date = new Date(seconds * 1000);
  return (date.toDateString() === new Date().toDateString() ? clock : dayAndClock).format(date).replace(/\p{Z}/gu, " ");
}

/** Seconds since 1970 -> hour and minute in the reader's zone, with the date if it is not today. */
export const minuteOf = (seconds) => localTime(seconds).replace(/(:\d\d):\d\d/, "$1");

/** A <time> element: local time, UTC on hover. */
export function timeElement(seconds) {
  const element = document.createElement("time");
  element.dateTime = utc(seconds);
  element.title = `${utc(seconds).replace("T", " ").replace("Z", "")} UTC`;
  element.textContent = localTime(seconds);
  return element;
}
