//! Bytes as text in hexadecimal, two digits for each.

use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serializer};

/// Writes `bytes`.
///
/// # Errors
///
/// As the serializer.
pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    let digit = |value: u8| char::from_digit(value.into(), 16).unwrap_or_default();
    let mut text = String::with_capacity(2 * bytes.len());
    bytes.iter().for_each(|byte| text.extend([digit(byte >> 4), digit(byte & 15)]));
    serializer.serialize_str(&text)
}

/// Reads at most `most` bytes.
///
/// # Errors
///
/// It is something else.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D, most: usize) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let wrong = || D::Error::custom(format!("not bytes in hexadecimal, at most {most}"));
    if text.len() > 2 * most {
        return Err(wrong());
    }
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let byte = |pair: &[u8]| match pair {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    };
    text.as_bytes().chunks(2).map(byte).collect::<Option<_>>().ok_or_else(wrong)
}
