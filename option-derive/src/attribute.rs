//! The attributes of a struct and of its fields: `#[options(...)]` and `#[option(...)]`.

use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Error, Expr, Ident, LitStr, Path, Result, Token, parenthesized};

/// Use of the struct, by `#[options(...)]`.
pub(crate) enum Use {
    /// An option of the command line, and the struct that it overrides if there is one.
    Option(LitStr, Option<Ident>),
    /// Fields of several options, which have it as a flattened field.
    Part,
    /// The body of a request, which has no command line.
    Body,
}

/// The arguments of `#[options(...)]`.
pub(crate) struct Header {
    pub usage: Use,
    /// True if the fields are changes, which set what they are applied to.
    pub changes: bool,
    /// A constant with the names of the fields that come first.
    pub order: Option<Path>,
}

impl Parse for Header {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut header = Self { usage: Use::Part, changes: false, order: None };
        while !input.is_empty() {
            if input.peek(LitStr) {
                header.usage = Use::Option(input.parse()?, None);
            } else {
                let word: Ident = input.parse()?;
                match (word.to_string().as_str(), &mut header.usage) {
                    ("part", _) => header.usage = Use::Part,
                    ("body", _) => header.usage = Use::Body,
                    ("changes", _) => header.changes = true,
                    ("order", _) => {
                        input.parse::<Token![=]>()?;
                        header.order = Some(input.parse()?);
                    }
                    ("over", Use::Option(_, base)) => {
                        input.parse::<Token![=]>()?;
                        *base = Some(input.parse()?);
                    }
                    _ => return Err(Error::new(word.span(), "expected part, body, changes, order or over")),
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(header)
    }
}

/// Role of the field in a struct of overrides.
#[derive(Clone, Copy)]
pub(crate) enum Overriding {
    /// A setting that the base does not set.
    Own,
    /// The base's setting if it is `None`.
    Inherited,
    /// No setting of the base.
    Apart,
}

/// Form of the field on the command line.
pub(crate) enum Kind {
    /// A key, with the syntax of its value.
    Key(String, String),
    /// Several keys of its own, and an object in JSON.
    Part,
    /// The fields of a part, on the command line and in JSON.
    Flatten,
    /// None.
    JsonOnly,
}

/// Value of a field that is not given.
pub(crate) enum Default {
    /// This value, which the help shows.
    Value(Expr),
    /// This value, which depends on other fields.
    From(Expr),
    /// The default of its type.
    OfType,
    /// None: the field is required.
    Required,
}

/// The argument of `ch-remote` that changes the field in a running VM.
pub(crate) struct Change {
    /// Name of its value, by default that of the key.
    pub value_name: Option<LitStr>,
    /// Help.
    pub about: LitStr,
}

/// Help texts in place of those of the flattened part.
pub(crate) enum About {
    /// A text for all keys.
    All(LitStr),
    /// A text for each of some keys.
    Some(Vec<(Ident, LitStr)>),
}

/// The arguments of `#[option(...)]`.
pub(crate) struct Arguments {
    pub kind: Kind,
    pub default: Default,
    pub overriding: Overriding,
    pub alias: Option<LitStr>,
    /// True if a text without a key is most likely its value.
    pub bare: bool,
    pub change: Option<Change>,
    pub about: About,
}

impl Arguments {
    /// Arguments of a field without the attribute.
    pub(crate) fn none() -> Self {
        Self {
            kind: Kind::JsonOnly,
            default: Default::OfType,
            overriding: Overriding::Own,
            alias: None,
            bare: false,
            change: None,
            about: About::Some(Vec::new()),
        }
    }

    fn read_word(&mut self, word: &Ident, input: ParseStream<'_>) -> Result<()> {
        let assigned = || input.parse::<Token![=]>();
        match word.to_string().as_str() {
            "part" => self.kind = Kind::Part,
            "flatten" => self.kind = Kind::Flatten,
            "required" => self.default = Default::Required,
            "inherited" => self.overriding = Overriding::Inherited,
            "apart" => self.overriding = Overriding::Apart,
            "bare" => self.bare = true,
            "alias" => {
                assigned()?;
                self.alias = Some(input.parse()?);
            }
            "default" => {
                assigned()?;
                self.default = Default::Value(input.parse()?);
            }
            "default_from" => {
                assigned()?;
                self.default = Default::From(input.parse()?);
            }
            "change" => self.change = Some(change(input)?),
            "about" => self.about = about(input)?,
            _ => {
                let expected = "expected alias, bare, default, default_from, required, part, flatten, about, change, \
                                inherited or apart";
                return Err(Error::new(word.span(), expected));
            }
        }
        Ok(())
    }
}

/// Reads `("help")` or `("value", "help")`.
fn change(input: ParseStream<'_>) -> Result<Change> {
    let inner;
    parenthesized!(inner in input);
    let texts = Punctuated::<LitStr, Token![,]>::parse_terminated(&inner)?;
    match texts.iter().collect::<Vec<_>>()[..] {
        [about] => Ok(Change { value_name: None, about: about.clone() }),
        [value, about] => Ok(Change { value_name: Some(value.clone()), about: about.clone() }),
        _ => Err(inner.error("write change(\"help\") or change(\"value\", \"help\")")),
    }
}

/// Reads `= "help"` or `(key = "help", ...)`.
fn about(input: ParseStream<'_>) -> Result<About> {
    if input.parse::<Option<Token![=]>>()?.is_some() {
        return Ok(About::All(input.parse()?));
    }
    let inner;
    parenthesized!(inner in input);
    let mut texts = Vec::new();
    while !inner.is_empty() {
        let key = inner.parse()?;
        inner.parse::<Token![=]>()?;
        texts.push((key, inner.parse()?));
        inner.parse::<Option<Token![,]>>()?;
    }
    Ok(About::Some(texts))
}

impl Parse for Arguments {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut arguments = Self::none();
        while !input.is_empty() {
            if input.peek(LitStr) {
                let text: LitStr = input.parse()?;
                let Some((key, syntax)) = text.value().split_once('=').map(|(k, s)| (k.to_string(), s.to_string()))
                else {
                    return Err(Error::new(text.span(), "write it as \"key=<syntax>\""));
                };
                arguments.kind = Kind::Key(key, syntax);
            } else {
                let word: Ident = input.parse()?;
                arguments.read_word(&word, input)?;
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(arguments)
    }
}
