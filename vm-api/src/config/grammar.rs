//! The grammar of `key=value,key=value`.
//!
//! Commas separate pairs, except within double quotes or brackets. A doubled quote within quotes is a quote. Blanks
//! around a value are ignored. Only [`path_or_fd`] interprets keys.

use std::os::fd::RawFd;
use std::path::PathBuf;

/// A `key=value` of an option. The value keeps its quotes, so that a list can be split by the same rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// The text before the first `=`.
    pub key: String,
    /// The text after the `=`, or `None` without one.
    pub value: Option<String>,
}

/// A resource of the host: a path, or a descriptor that is already open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathOrFd {
    /// A path; not empty.
    Path(PathBuf),
    /// A descriptor of the process, above 2.
    Fd(RawFd),
}

/// Reads `path=<path>` or `fd=<number>`; `None` if the text is neither.
pub fn path_or_fd(text: &str) -> Option<PathOrFd> {
    let [Pair { key, value: Some(value) }] = &pairs(text).ok()?[..] else { return None };
    let value = unquote(value).ok()?;
    match key.as_str() {
        "path" if !value.is_empty() => Some(PathOrFd::Path(value.into())),
        "fd" => value.parse().ok().filter(|fd| *fd > 2).map(PathOrFd::Fd),
        _ => None,
    }
}

/// Splits an option into pairs. An empty part between two commas is skipped.
///
/// # Errors
///
/// An unclosed quote or bracket, or a closing bracket without an opening one.
pub fn pairs(text: &str) -> Result<Vec<Pair>, String> {
    let pair = |part: String| match part.split_once('=') {
        Some((key, value)) => Pair { key: key.trim().to_string(), value: Some(value.trim().to_string()) },
        None => Pair { key: part, value: None },
    };
    Ok(split(text)?.into_iter().filter(|part| !part.is_empty()).map(pair).collect())
}

/// The elements of `[a,b,c]`; the brackets are optional.
///
/// # Errors
///
/// As [`pairs`].
pub fn list(value: &str) -> Result<Vec<String>, String> {
    let inner = match value.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').ok_or("a bracket is not closed")?,
        None => value,
    };
    if inner.trim().is_empty() {
        return Ok(Vec::new());
    }
    split(inner)?.into_iter().map(unquote).collect()
}

/// Removes the quotes of a value.
///
/// # Errors
///
/// An unclosed quote.
pub fn unquote(value: impl AsRef<str>) -> Result<String, String> {
    let mut text = String::new();
    let mut quoted = false;
    let mut chars = value.as_ref().chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.next_if_eq(&'"').is_some() => text.push('"'),
            '"' => quoted = !quoted,
            c => text.push(c),
        }
    }
    if quoted { Err("a double quote is not closed".to_string()) } else { Ok(text) }
}

/// Quotes a text, if that is needed to parse it as the same text.
pub fn quote(text: &str) -> String {
    let plain = !text.contains([',', '"', '[', ']']) && text.trim() == text;
    if plain { text.to_string() } else { format!("\"{}\"", text.replace('"', "\"\"")) }
}

/// Splits at commas outside of quotes and brackets, and trims the parts.
fn split(text: &str) -> Result<Vec<String>, String> {
    let mut parts = vec![String::new()];
    let mut quoted = false;
    let mut depth = 0u32;
    for c in text.chars() {
        match c {
            // A doubled quote leaves and enters, so the state after it is the same.
            '"' => quoted = !quoted,
            '[' if !quoted => depth = depth.saturating_add(1),
            ']' if !quoted => depth = depth.checked_sub(1).ok_or("a closing bracket has no opening one")?,
            ',' if !quoted && depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    if quoted {
        return Err("a double quote is not closed".to_string());
    }
    if depth > 0 {
        return Err("a bracket is not closed".to_string());
    }
    Ok(parts.iter().map(|part| part.trim().to_string()).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Vec<(String, Option<String>)> {
        pairs(text).unwrap().into_iter().map(|pair| (pair.key, pair.value)).collect()
    }

    fn pair(key: &str, value: &str) -> (String, Option<String>) {
        (key.to_string(), Some(value.to_string()))
    }

    #[test]
    fn a_comma_separates_outside_of_quotes_and_brackets() {
        assert_eq!(read("a=1,b=2"), [pair("a", "1"), pair("b", "2")]);
        assert_eq!(read(r#"a="1,2",b=[3,[4,5]],c="#), [pair("a", r#""1,2""#), pair("b", "[3,[4,5]]"), pair("c", "")]);
        assert_eq!(read(r#"a="]",b=x"#), [pair("a", r#""]""#), pair("b", "x")]);
    }

    #[test]
    fn only_the_first_equals_sign_separates_key_and_value() {
        assert_eq!(read("a = b=c "), [pair("a", "b=c")]);
        assert_eq!(read("off"), [("off".to_string(), None)]);
    }

    #[test]
    fn an_empty_part_is_no_pair() {
        assert_eq!(read(""), []);
        assert_eq!(read("a=1,,b=2,"), [pair("a", "1"), pair("b", "2")]);
    }

    #[test]
    fn quotes_and_brackets_must_be_closed() {
        for text in ["a=\"x", "a=[1,2", "a=1]", "a=[\"]\""] {
            assert!(pairs(text).is_err(), "{text}");
        }
        assert!(list("[1").is_err());
    }

    #[test]
    fn a_doubled_quote_is_a_quote() {
        assert_eq!(unquote(r#""say ""hi"", twice""#).unwrap(), r#"say "hi", twice"#);
        assert_eq!(unquote(r#""""#).unwrap(), "");
    }

    #[test]
    fn a_list_may_go_without_brackets() {
        for text in ["[3, 4]", "3,4"] {
            assert_eq!(list(text).unwrap(), ["3", "4"]);
        }
        assert_eq!(list("[]").unwrap(), Vec::<String>::new());
        assert_eq!(list(r#"["a,b",c]"#).unwrap(), ["a,b", "c"]);
    }

    proptest! {
        #[test]
        fn any_text_reads_back_from_what_is_printed(text in any::<String>()) {
            let option = format!("key={},next=1", quote(&text));
            let pairs = pairs(&option).unwrap();
            prop_assert_eq!(pairs.len(), 2);
            prop_assert_eq!(unquote(pairs[0].value.as_ref().unwrap()).unwrap(), text);
        }

        #[test]
        fn no_text_panics(text in any::<String>()) {
            let _ = pairs(&text);
            let _ = list(&text);
            let _ = unquote(&text);
        }
    }
}
