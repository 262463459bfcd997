//! `keep_alive` of Ollama's API: the time for which a model stays loaded after a request.

use std::time::Duration;

use serde_json::Value as Json;

use crate::error::ServeError;

/// Time for which a model stays loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeepAlive {
    /// Idle time after which it is unloaded.
    For(Duration),
    /// The model is never unloaded.
    Forever,
}

/// Units of a duration in seconds; longer names come first.
const UNITS: [(&str, f64); 7] =
    [("ms", 1e-3), ("us", 1e-6), ("µs", 1e-6), ("ns", 1e-9), ("h", 3600.0), ("m", 60.0), ("s", 1.0)];

/// Returns the `keep_alive` of a request: a number of seconds, or a duration such as "5m" or "1h30m". Negative ones
/// mean forever.
///
/// # Errors
/// If it is neither.
pub(super) fn read(body: &Json) -> Result<Option<KeepAlive>, ServeError> {
    let seconds = match &body["keep_alive"] {
        Json::Null => return Ok(None),
        Json::Number(number) => number.as_f64(),
        Json::String(text) => duration(text),
        _ => None,
    };
    match seconds {
        Some(seconds) if seconds < 0.0 => Ok(Some(KeepAlive::Forever)),
        Some(seconds) => Ok(Some(Duration::try_from_secs_f64(seconds).map_or(KeepAlive::Forever, KeepAlive::For))),
        None => {
            let problem = "`keep_alive` has to be a number of seconds, or a duration such as \"5m\"";
            Err(ServeError::field("keep_alive", problem))
        }
    }
}

/// Parses a duration in the form of Go, in seconds. A number without a unit counts seconds.
fn duration(text: &str) -> Option<f64> {
    let text = text.trim();
    if let Ok(seconds) = text.parse() {
        return Some(seconds).filter(|seconds: &f64| seconds.is_finite());
    }
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    if rest.is_empty() {
        return None;
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        let (unit, size) = UNITS.iter().find(|(unit, _)| rest[digits..].starts_with(unit))?;
        seconds += number * size;
        rest = &rest[digits + unit.len()..];
    }
    Some(sign * seconds)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn times_are_seconds_or_durations() {
        let read = |value: Json| read(&json!({"keep_alive": value}));
        let seconds = |seconds: f64| Some(KeepAlive::For(Duration::from_secs_f64(seconds)));
        for (value, expected) in [
            (json!(null), None),
            (json!(0), seconds(0.0)),
            (json!(1.5), seconds(1.5)),
            (json!("0"), seconds(0.0)),
            (json!("5m"), seconds(300.0)),
            (json!("1h30m"), seconds(5400.0)),
            (json!("250ms"), seconds(0.25)),
            (json!(-1), Some(KeepAlive::Forever)),
            (json!("-1m"), Some(KeepAlive::Forever)),
            (json!(1e300), Some(KeepAlive::Forever)),
        ] {
            assert_eq!(read(value.clone()).unwrap(), expected, "{value}");
        }
        for wrong in [json!("soon"), json!(""), json!("5 apples"), json!("-"), json!([]), json!("inf"), json!("m")] {
            assert!(read(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
