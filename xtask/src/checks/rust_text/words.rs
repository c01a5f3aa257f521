//! Words and idioms that comments, strings and documents do not have (CONTRIBUTING.md), and what they have instead.

/// The words, in lower case and joined by `_`, and the advice for each. A word is on this list only if it is always
/// wrong, since there are no exceptions. Words in backquotes and strings of one word are names, and are not checked.
static REFUSED: [(&str, &str); 46] = [
    ("adrift", "disconnected, recovering"),
    ("albeit", "although"),
    ("anew", "again"),
    ("any_more", "no longer"),
    ("anymore", "no longer"),
    ("are_told", "receive, are notified"),
    ("asleep", "the name of the state"),
    ("at_large", "not stopped"),
    ("be_told", "receive, be notified"),
    ("been_told", "received, been notified"),
    ("beside", "next to, besides, in addition to, with"),
    ("but_for", "except"),
    ("deaf", "disconnected, without notifications"),
    ("errand", "task"),
    ("errands", "tasks"),
    ("for_good", "permanently, always"),
    ("for_want_of", "without, for lack of"),
    ("go_on", "continue, resume"),
    ("goes_on", "continues, resumes"),
    ("going_on", "in progress"),
    ("gone_on", "continued"),
    ("hear", "receive, get"),
    ("hears", "receives, gets"),
    ("heed", "follow"),
    ("henceforth", "from now on"),
    ("hung_up_on", "disconnected"),
    ("in_vain", "without success"),
    ("is_told", "receives, is notified"),
    ("let_go", "release"),
    ("lets_go", "releases"),
    ("meanwhile", "in the meantime, during that time"),
    ("nobody", "the actor by its name, or `no` and its name"),
    ("so_long_as", "while, if"),
    ("somebody", "the actor by its name"),
    ("stand_still", "are paused, are stopped"),
    ("standing_still", "paused, stopped"),
    ("stands_still", "is paused, is stopped"),
    ("stood_still", "was paused, was stopped"),
    ("was_told", "received, was notified"),
    ("went_on", "continued"),
    ("were_told", "received, were notified"),
    ("whereby", "by which"),
    ("whoever", "the actor by its name"),
    ("wish", "request"),
    ("wishes", "requests"),
    ("without_a_word", "silently"),
];

/// A refused word that was found: the number of its line, and the word with its advice.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found(pub usize, pub String);

/// Finds refused words in the comments and strings of Rust code.
pub(super) fn in_rust(code: &str) -> Vec<Found> {
    let mut words = Words::default();
    let mut at = 0;
    while let Some(c) = code[at..].chars().next() {
        let rest = &code[at..];
        if let Some(prose) = comment(rest) {
            words.add(at, prose);
            at += prose.len();
        } else if let Some((prose, len)) = string(rest) {
            words.end_phrase();
            if prose.contains(char::is_whitespace) {
                words.add(at, prose);
            }
            words.end_phrase();
            at += len;
        } else {
            if !c.is_whitespace() {
                words.end_phrase();
            }
            at += character(rest).unwrap_or(c.len_utf8());
        }
    }
    words.refused(code)
}

/// Finds refused words in a document of Markdown, outside of its blocks of code.
pub(super) fn in_document(text: &str) -> Vec<Found> {
    let (mut words, mut at, mut is_code) = (Words::default(), 0, false);
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
            words.end_phrase();
        } else if !is_code {
            words.add(at, line);
        }
        at += line.len();
    }
    words.refused(text)
}

/// The phrases that begin with the letter of `word`. There are half a million words: each is compared with few phrases.
fn beginning_as(word: &str) -> &'static [(&'static str, &'static str)] {
    let Some(letter) = word.bytes().next().map(|letter| letter.to_ascii_lowercase()) else { return &[] };
    let first = |phrase: &str| phrase.bytes().next().unwrap_or_default();
    let from = REFUSED.partition_point(|(phrase, _)| first(phrase) < letter);
    let len = REFUSED[from..].partition_point(|(phrase, _)| first(phrase) == letter);
    &REFUSED[from..from + len]
}

/// The comment of one line that `code` begins with. Its marks are as white space.
fn comment(code: &str) -> Option<&str> {
    code.split('\n').next().filter(|line| line.starts_with("//"))
}

/// The string, raw or not, that `code` begins with: up to its end without the closing mark, and its whole length.
fn string(code: &str) -> Option<(&str, usize)> {
    let hashes = code.strip_prefix('r').map(|raw| raw.len() - raw.trim_start_matches('#').len());
    let open = hashes.map_or(1, |hashes| hashes + 2);
    let inner = code.get(open..).filter(|_| code[..open].ends_with('"'))?;
    let close = format!("\"{}", "#".repeat(hashes.unwrap_or(0)));
    let len = if hashes.is_some() { inner.find(&close) } else { unescaped_quote(inner) }?;
    Some((&code[..open + len], open + len + close.len()))
}

/// The offset of the quotation mark that ends a string.
fn unescaped_quote(inner: &str) -> Option<usize> {
    let mut is_escaped = false;
    inner.bytes().position(|byte| {
        let ends = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends
    })
}

/// The length of the character literal that `code` begins with, such as that of a quotation mark.
fn character(code: &str) -> Option<usize> {
    let inner = code.strip_prefix('\'')?;
    let first = inner.chars().next()?;
    let skipped = if first == '\\' { 2 } else { first.len_utf8() };
    let end = inner.get(skipped..)?.find('\'').filter(|end| first == '\\' || *end == 0)?;
    Some(1 + skipped + end + 1)
}

/// The words of a text with their offsets. Words of one phrase have white space alone between them; elsewhere is an
/// empty word.
#[derive(Default)]
struct Words<'a>(Vec<(usize, &'a str)>);

impl<'a> Words<'a> {
    fn end_phrase(&mut self) {
        self.0.push((0, ""));
    }

    /// Adds the words of the part of the text at `at`, without what is in backquotes or braces.
    fn add(&mut self, at: usize, part: &'a str) {
        let mut done = 0;
        while let Some(c) = part[done..].chars().next() {
            let rest = &part[done..];
            let word = rest.len() - rest.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_').len();
            done += match c {
                _ if word > 0 => {
                    self.0.push((at + done, &rest[..word]));
                    word
                }
                '/' | '!' | ' ' | '\n' | '\r' | '"' => 1,
                // An escape, also that of the end of a line of a string.
                '\\' => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
                _ => {
                    self.end_phrase();
                    match c {
                        '`' => rest[1..].find('`').map_or(1, |end| end + 2),
                        '{' => rest.find('}').map_or(1, |end| end + 1),
                        _ => c.len_utf8(),
                    }
                }
            };
        }
    }

    /// The refused words, in their order.
    fn refused(&self, text: &str) -> Vec<Found> {
        let mut found = Vec::new();
        for (index, (at, word)) in self.0.iter().enumerate() {
            let phrases = beginning_as(word).iter();
            for (phrase, advice) in phrases.filter(|(phrase, _)| self.has(index, phrase)) {
                let line = text[..*at].matches('\n').count() + 1;
                found.push(Found(line, format!("{}; say: {advice}", phrase.replace('_', " "))));
            }
        }
        found
    }

    /// True if the words from `start` on are those of the phrase.
    fn has(&self, start: usize, phrase: &str) -> bool {
        let mut words = self.0[start..].iter();
        phrase.split('_').all(|word| words.next().is_some_and(|(_, found)| found.eq_ignore_ascii_case(word)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of the words that are found.
    fn lines(found: Vec<Found>) -> Vec<usize> {
        found.into_iter().map(|found| found.0).collect()
    }

    /// A text of which each `@` is a refused word.
    fn with_word(text: &str) -> String {
        text.replace('@', "nobody")
    }

    #[test]
    fn words_of_code_are_those_of_comments_and_of_strings_of_two() {
        let code = r##"let @ = "@"; // A @
/// `@` is a name, and so is `the
/// user @`.
const A: &str = "no {@} here, \"@\"";
const B: (char, char, &str) = ('"', '\'', r#"a "@" "#);
fn a<'a>(of: &'a str) { @("a", '@') }
"##;
        let found = in_rust(&with_word(&code.replace("'@'", "'\\u{40}'")));
        assert_eq!(lines(found), [1, 3, 4, 5]);
    }

    #[test]
    fn a_phrase_may_be_on_two_lines_of_a_comment_or_a_string() {
        let halves = ["STANDS", "still"];
        let broken = |between: &str| lines(in_rust(&format!("\n// It {}", halves.join(between))));
        assert_eq!([broken(" "), broken("\n    //! "), broken("\n/// ")], [[2], [2], [2]]);
        assert_eq!([broken(", "), broken("\nlet a = 1; // "), broken("_")], [[0; 0], [0; 0], [0; 0]]);
        assert_eq!(lines(in_rust(&format!("log(\"It {}\");", halves.join(" \\\n    ")))), [1]);
    }

    #[test]
    fn a_document_is_checked_outside_of_its_code() {
        let text = with_word("@'s\n```\n@\n```\n| `@` | @ |\n[a](#at-@-b_@)\n");
        assert_eq!(lines(in_document(&text)), [1, 5, 6]);
        let advice = with_word("@; say: the actor by its name, or `no` and its name");
        assert_eq!(in_document(&with_word("@"))[0].1, advice);
    }

    #[test]
    fn the_list_is_in_order_and_each_advice_is_itself_allowed() {
        assert!(REFUSED.is_sorted_by(|a, b| a.0 < b.0));
        for (phrase, advice) in REFUSED {
            assert_eq!(in_document(advice), [], "{phrase}");
            assert_eq!(in_document(&phrase.replace('_', " ").to_uppercase()).len(), 1, "{phrase}");
        }
    }
}
