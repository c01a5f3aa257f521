//! Bytes that a saved state holds as hexadecimal text, two digits for each: half the size of a list of numbers.

use serde::{Deserialize, Serialize};

/// At most `MOST` bytes. Longer values are saved, but not restored.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HexBytes<const MOST: usize>(pub Vec<u8>);

impl<const MOST: usize> From<HexBytes<MOST>> for String {
    fn from(HexBytes(bytes): HexBytes<MOST>) -> Self {
        let digit = |value: u8| char::from_digit(value.into(), 16).unwrap_or_default();
        bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
    }
}

impl<const MOST: usize> TryFrom<String> for HexBytes<MOST> {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("not bytes in hexadecimal, at most {MOST}");
        if text.len() > 2 * MOST {
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
        text.as_bytes().chunks(2).map(byte).collect::<Option<_>>().map(Self).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_back_and_other_text_is_refused() {
        let bytes = HexBytes::<256>((0..=255).collect());
        assert_eq!(HexBytes::try_from(String::from(bytes.clone())), Ok(bytes));
        for text in ["0", "0g", "A0", "00 ", "é0", "+1"] {
            assert!(HexBytes::<256>::try_from(text.to_string()).is_err(), "{text}");
        }
        assert!(HexBytes::<2>::try_from("00".repeat(2)).is_ok());
        assert!(HexBytes::<2>::try_from("00".repeat(3)).is_err());
    }
}
