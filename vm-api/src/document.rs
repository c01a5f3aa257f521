//! JSON from a client, parsed within limits.
//!
//! A tree takes up to a hundred times the memory of its text. So arrays are limited, and so is the whole: no client can
//! create a large tree from a small text, or an endless one from a large text.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// The most elements of an array.
pub const MOST_ELEMENTS: usize = 1024;
/// The most elements of an array [`PER_VF`]: the most VFs of a PF.
pub const MOST_VFS: usize = 32_512;
/// The array with an element for each VF.
const PER_VF: &str = "vfs";
/// The approximate memory limit of a tree, in bytes: enough for [`MOST_VFS`] with eight settings each.
const MOST_MEMORY: usize = 64 << 20;

/// The approximate memory of an array's element or an object's value, in bytes, without the data that it refers to.
const OF_VALUE: usize = 64;
/// The same of an object's key.
const OF_KEY: usize = 56;
/// The same for an object that is not empty: a node of its map has room for 11 keys and values.
const OF_OBJECT: usize = 640;

/// Reason why a text is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// The text is not JSON.
    #[error("not JSON: {0}")]
    Syntax(String),
    /// The document repeats a key or exceeds a limit.
    #[error("{path}: {what}")]
    Content {
        /// Path in the document.
        path: String,
        /// Fault there, and remedy.
        what: String,
    },
}

/// Reads a JSON document.
///
/// # Errors
///
/// See [`DocumentError`]; a repeated key is named by its path.
pub fn read(text: &[u8]) -> Result<Value, DocumentError> {
    let mut reader = Reader { path: Vec::new(), left: MOST_MEMORY, refused: None };
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let read = Node { reader: &mut reader, most: MOST_ELEMENTS }.deserialize(&mut deserializer);
    let read = read.and_then(|value| deserializer.end().map(|()| value));
    read.map_err(|error| match reader.refused {
        Some(error) => error,
        None => DocumentError::Syntax(error.to_string()),
    })
}

/// Visitor of a document's values.
struct Reader {
    /// Path of the current value in the document.
    path: Vec<Step>,
    /// The memory left for the tree.
    left: usize,
    /// Fault of its content.
    refused: Option<DocumentError>,
}

enum Step {
    Key(String),
    Index(usize),
}

impl Reader {
    fn refuse<E: Error>(&mut self, what: &str) -> E {
        let mut path = String::new();
        for step in &self.path {
            match step {
                Step::Key(key) if path.is_empty() => path.push_str(key),
                Step::Key(key) => path.extend([".", key]),
                Step::Index(index) => path.push_str(&format!("[{index}]")),
            }
        }
        if path.is_empty() {
            path.push_str("the document");
        }
        self.refused = Some(DocumentError::Content { path, what: what.to_string() });
        E::custom("refused")
    }

    fn take<E: Error>(&mut self, memory: usize) -> Result<(), E> {
        match self.left.checked_sub(memory) {
            Some(left) => self.left = left,
            None => return Err(self.refuse("with this, the document becomes too large; leave something out")),
        }
        Ok(())
    }
}

/// A value of the document.
struct Node<'r> {
    reader: &'r mut Reader,
    /// The most elements, if it is an array.
    most: usize,
}

impl<'de> DeserializeSeed<'de> for Node<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        self.reader.take(text.len())?;
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
        let Self { reader, most } = self;
        let mut array = Vec::new();
        loop {
            reader.path.push(Step::Index(array.len()));
            let Some(value) = elements.next_element_seed(Node { reader: &mut *reader, most: MOST_ELEMENTS })? else {
                break;
            };
            reader.path.pop();
            if array.len() == most {
                return Err(reader.refuse(&format!("more than {most} elements; give fewer")));
            }
            reader.take(OF_VALUE)?;
            array.push(value);
        }
        reader.path.pop();
        Ok(array.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let reader = self.reader;
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            reader.take(if object.is_empty() { OF_OBJECT } else { 0 } + OF_KEY + OF_VALUE + key.len())?;
            let is_repeated = object.contains_key(&key);
            let most = if key == PER_VF { MOST_VFS } else { MOST_ELEMENTS };
            reader.path.push(Step::Key(key));
            if is_repeated {
                return Err(reader.refuse("the key is given twice; give it once"));
            }
            let value = entries.next_value_seed(Node { reader: &mut *reader, most })?;
            if let Some(Step::Key(key)) = reader.path.pop() {
                object.insert(key, value);
            }
        }
        Ok(object.into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(text: &str) -> String {
        read(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_repeated_key_is_named_by_its_path() {
        assert_eq!(refused(r#"{"a": 1, "b": 2, "a": 1}"#), "a: the key is given twice; give it once");
        let text = r#"{"net": [{"id": "a"}, {"id": "b", "vfs": [{"index": 1, "i\u006edex": 2}]}]}"#;
        assert_eq!(refused(text), "net[1].vfs[0].index: the key is given twice; give it once");
        assert!(read(br#"{"a": {"a": [{"a": 1}, {"a": 2}]}}"#).is_ok());
    }

    #[test]
    fn an_array_has_a_limit() {
        let list = |count: usize| format!("[{}]", vec!["1"; count].join(","));
        assert!(read(list(MOST_ELEMENTS).as_bytes()).is_ok());
        assert_eq!(refused(&list(MOST_ELEMENTS + 1)), "the document: more than 1024 elements; give fewer");
        let net = |count: usize| format!(r#"{{"net": [{{"vfs": {}}}]}}"#, list(count));
        assert!(read(net(MOST_VFS).as_bytes()).is_ok());
        assert_eq!(refused(&net(MOST_VFS + 1)), "net[0].vfs: more than 32512 elements; give fewer");
        assert_eq!(refused(&format!(r#"{{"vfs": [{}]}}"#, list(1025))), "vfs[0]: more than 1024 elements; give fewer");
    }

    #[test]
    fn the_whole_has_a_limit_that_all_vfs_of_a_pf_fit_in() {
        let vf = r#"{"index":1,"tap":"pf0v31000","mac":"52:54:00:00:00:01","mtu":1400,"vhost":true,"num_queues":2},"#;
        let vfs = |vf: &str| format!(r#"{{"net":[{{"vfs":[{}]}}]}}"#, vf.repeat(MOST_VFS).trim_end_matches(','));
        assert!(read(vfs(vf).as_bytes()).is_ok());
        let deep = r#"{"":{"":{"":0}}},"#;
        let said = refused(&format!("[{0},{0},{0}]", vfs(deep)));
        assert!(said.ends_with(": with this, the document becomes too large; leave something out"), "{said}");
    }

    #[test]
    fn text_that_is_no_json_is_refused_with_its_position() {
        assert_eq!(refused("{"), "not JSON: EOF while parsing an object at line 1 column 1");
        assert_eq!(refused("{} x"), "not JSON: trailing characters at line 1 column 4");
        assert!(refused(&"[".repeat(200)).starts_with("not JSON: recursion limit exceeded"));
    }

    proptest! {
        #[test]
        fn it_reads_what_serde_json_reads(text in r#"[\[\]{}:,"a0-9.eE+\-truefalsn \\]{0,24}"#) {
            let expected = serde_json::from_str::<Value>(&text).ok();
            match read(text.as_bytes()) {
                Err(DocumentError::Content { .. }) => {}
                read => prop_assert_eq!(read.ok(), expected),
            }
        }
    }
}
