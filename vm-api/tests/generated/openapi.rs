//! The schemas of `api/openapi.yaml`, which are those of the types in `vm-api`.

use serde_json::{Map, Value};
use vm_api::openapi::components;
use vm_api::schema::Definition;

/// Line above the generated schemas, which end the file.
const BEGIN: &str =
    "    # Generated from the types of vm-api by `cargo xtask generate`. Change their doc comments instead.\n";

/// Order of keywords. Others come before the description.
const ORDER: [&str; 12] = [
    "type",
    "nullable",
    "format",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minimum",
    "maximum",
    "multipleOf",
    "default",
    "items",
];

#[test]
fn the_schemas_of_openapi_are_those_of_the_types() {
    crate::check("api/openapi.yaml", |text| {
        let (by_hand, _) = text.split_once(BEGIN).unwrap();
        let schemas: String = components().iter().map(schema).collect();
        format!("{by_hand}{BEGIN}{schemas}")
    });
}

/// A schema in lines of its own.
fn schema(definition: &Definition) -> String {
    let Definition { name, keywords, properties } = definition;
    let mut text = format!("    {name}:\n");
    for (word, value) in sorted(keywords) {
        text += &format!("      {word}: {}\n", flow(value));
    }
    if !properties.is_empty() {
        text += "      properties:\n";
    }
    for (name, value) in properties {
        text += &format!("        {name}: {}\n", flow(value));
    }
    text
}

fn sorted(keywords: &Map<String, Value>) -> Vec<(&String, &Value)> {
    let rank = |word: &str| match ORDER.iter().position(|known| *known == word) {
        Some(place) => place,
        None if word == "description" => ORDER.len() + 1,
        None => ORDER.len(),
    };
    let mut sorted: Vec<_> = keywords.iter().collect();
    sorted.sort_by_key(|(word, _)| rank(word));
    sorted
}

/// A value in one line.
fn flow(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let fields: Vec<_> =
                sorted(fields).into_iter().map(|(word, value)| format!("{word}: {}", flow(value))).collect();
            format!("{{ {} }}", fields.join(", "))
        }
        Value::Array(elements) => format!("[{}]", elements.iter().map(flow).collect::<Vec<_>>().join(", ")),
        Value::String(text) if is_plain(text) => text.clone(),
        Value::String(text) => format!("'{}'", text.replace('\'', "''")),
        other => other.to_string(),
    }
}

/// True if YAML 1.1 and 1.2 read the word as a string without quotes.
fn is_plain(text: &str) -> bool {
    let reserved = ["null", "true", "false", "yes", "no", "on", "off", "y", "n"];
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_/".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(is_name)
        && !reserved.contains(&text.to_ascii_lowercase().as_str())
}
