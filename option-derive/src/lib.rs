//! `#[derive(Options)]`: an ordinary struct as an option of the command line and as a JSON object.
//!
//! ```text
//! /// The virtual CPUs.
//! #[derive(Debug, Clone, PartialEq, Eq, Serialize, Options)]
//! #[options("--cpus")]
//! pub struct CpusConfig {
//!     /// Number of vCPUs at boot.
//!     #[option("boot=<number>", default = 1)]
//!     pub boot_vcpus: u32,
//!     /// Maximum number of vCPUs, by default the same as boot.
//!     #[option("max=<number>", default_from = boot_vcpus)]
//!     pub max_vcpus: u32,
//! }
//! ```
//!
//! The field's name is JSON's. The attribute has the key of the command line with the syntax that `--help` shows, and
//! the doc comment is the help text. A field without the attribute exists only in JSON.
//!
//! | attribute | meaning |
//! |---|---|
//! | `default = <expression>` | the value if the key is left out, which `--help` shows; otherwise that of `Default` |
//! | `default_from = <expression>` | the same, computed from the fields above it; `--help` shows none |
//! | `required` | the key must be given |
//! | `alias = "<key>"` | another name of the key and of the field, which is read but never written |
//! | `#[option(part)]` | the field has several keys of its own (`Part`) |
//! | `inherited`, `apart` | see below |
//!
//! `#[options("--net-vf", over = NetConfig)]` makes the struct one of overrides: `over_defaults(&self, base)` is a
//! `NetConfig` with this struct's fields. An `inherited` field that is `None` has the base's value; an `apart` field is
//! not in the base.
//!
//! The derive implements `Default`, `Deserialize`, `FromStr`, `Display`, `Options` and `Described`. It generates the
//! code that differs between structs; shared code is ordinary code in `vm-api/src/config/option.rs`. `Serialize` is
//! serde's own.

//!
//! `#[derive(Schema)]` is for all types of the API's JSON, options or not: it describes them for `api/openapi.yaml`, with
//! the doc comments as descriptions. It reads serde's attributes, those above, and its own:
//!
//! | `#[schema(...)]` of a type | meaning |
//! |---|---|
//! | `name = "<name>"` | the name of its schema, by default the type's |
//! | `unsupported = <object>` | fields that are not supported yet, of this `unsupported::Object` |
//! | `shows_default` | an enum's default is described |
//!
//! | of a field | meaning |
//! |---|---|
//! | `minimum = <number>`, `max_length = <number>` and so on | OpenAPI's keywords |
//! | `items(...)` | the same for the elements of an array |
//! | `limits = <name>` | a constant of `vm-api/src/schema.rs` with several of them |
//! | `about = "<text>"` | a description, if the doc comment is about the command line |
//! | `required` | a VM file may leave it out, but not a client |
//! | `of = <type>` | the described type, if it is narrower than the field's |
//! | `named = "<name>"` | a second schema of the field's type, described by the field's doc comment |

mod schema;

use proc_macro::TokenStream;
use proc_macro2::TokenStream as Code;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Attribute, Data, DeriveInput, Error, Expr, Field, Fields, Ident, Lit, LitStr, Meta, Result, Token, Type};

/// Derives an option of the command line; see the crate's documentation.
#[proc_macro_derive(Options, attributes(options, option))]
pub fn options(input: TokenStream) -> TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    expand(&input).unwrap_or_else(|error| error.into_compile_error()).into()
}

/// Describes a type of the API's JSON; see the crate's documentation.
#[proc_macro_derive(Schema, attributes(schema))]
pub fn schema(input: TokenStream) -> TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    schema::expand(&input).unwrap_or_else(|error| error.into_compile_error()).into()
}

/// Field of the struct.
struct Setting {
    name: Ident,
    ty: Type,
    about: String,
    kind: Kind,
    default: Default,
    overriding: Overriding,
    alias: Option<LitStr>,
}

/// Role of the field in a struct of overrides.
#[derive(Clone, Copy)]
enum Overriding {
    /// A setting that the base does not set.
    Own,
    /// The base's setting if it is `None`.
    Inherited,
    /// No setting of the base.
    Apart,
}

/// Form of the field on the command line.
enum Kind {
    /// A key, with the syntax of its value.
    Key(String, String),
    /// Several keys of its own.
    Part,
    /// None.
    JsonOnly,
}

/// Value of a field that is not given.
enum Default {
    /// This value, which the help shows.
    Value(Expr),
    /// This value, which depends on other fields.
    From(Expr),
    /// The default of its type.
    OfType,
    /// None: the field is required.
    Required,
}

/// The arguments of `#[option(...)]`.
struct Arguments(Kind, Default, Overriding, Option<LitStr>);

impl Parse for Arguments {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut arguments = Self(Kind::JsonOnly, Default::OfType, Overriding::Own, None);
        while !input.is_empty() {
            if input.peek(LitStr) {
                let text: LitStr = input.parse()?;
                let Some((key, syntax)) = text.value().split_once('=').map(|(k, s)| (k.to_string(), s.to_string()))
                else {
                    return Err(Error::new(text.span(), "write it as \"key=<syntax>\""));
                };
                arguments.0 = Kind::Key(key, syntax);
            } else {
                let word: Ident = input.parse()?;
                match word.to_string().as_str() {
                    "part" => arguments.0 = Kind::Part,
                    "required" => arguments.1 = Default::Required,
                    "inherited" => arguments.2 = Overriding::Inherited,
                    "apart" => arguments.2 = Overriding::Apart,
                    "alias" => {
                        input.parse::<Token![=]>()?;
                        arguments.3 = Some(input.parse()?);
                    }
                    "default" => {
                        input.parse::<Token![=]>()?;
                        arguments.1 = Default::Value(input.parse()?);
                    }
                    "default_from" => {
                        input.parse::<Token![=]>()?;
                        arguments.1 = Default::From(input.parse()?);
                    }
                    _ => {
                        let expected = "expected alias, default, default_from, required, part, inherited or apart";
                        return Err(Error::new(word.span(), expected));
                    }
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(arguments)
    }
}

impl Setting {
    fn of(field: &Field) -> Result<Self> {
        let name = field.ident.clone().ok_or_else(|| Error::new_spanned(field, "a field has a name"))?;
        let attribute = field.attrs.iter().find(|attribute| attribute.path().is_ident("option"));
        let Arguments(kind, default, overriding, alias) = match attribute {
            Some(attribute) => attribute.parse_args()?,
            None => Arguments(Kind::JsonOnly, Default::OfType, Overriding::Own, None),
        };
        Ok(Self { name, ty: field.ty.clone(), about: about(&field.attrs), kind, default, overriding, alias })
    }

    /// The serde attribute of the field before defaults.
    fn given(&self) -> Code {
        let alias = self.alias.as_ref().map(|alias| quote!(, alias = #alias));
        quote!(#[serde(default #alias)])
    }

    /// The default value. A required field needs one only in `Default`.
    fn default(&self) -> Code {
        match &self.default {
            Default::Value(value) | Default::From(value) => quote!(#value),
            Default::OfType | Default::Required => quote!(::std::default::Default::default()),
        }
    }

    /// Assigns the given value or the default to a variable: `let field = ...`.
    fn resolved(&self) -> Code {
        let Self { name, ty, .. } = self;
        let otherwise = match self.default {
            Default::Required => quote!(return Err(option::missing::<Self>(stringify!(#name)))),
            _ => self.default(),
        };
        quote!(let #name: #ty = match given.#name { Some(value) => value, None => #otherwise };)
    }

    /// Adds its keys to `keys`, for the help.
    fn described(&self) -> Code {
        let Self { name, ty, about, .. } = self;
        match &self.kind {
            Kind::Key(key, syntax) => {
                let default = match self.default {
                    Default::Value(_) | Default::OfType => quote!(Value::print(&default.#name)),
                    Default::From(_) | Default::Required => quote!(None),
                };
                quote!(keys.push(Key { name: #key, syntax: #syntax, default: #default, about: #about.to_string() });)
            }
            Kind::Part => quote!(keys.extend(<#ty as Part>::keys());),
            Kind::JsonOnly => quote!(),
        }
    }

    /// Adds its keys and values to `pairs`.
    fn printed(&self) -> Code {
        let name = &self.name;
        match &self.kind {
            Kind::Key(key, _) => quote!(pairs.extend(Value::print(&self.#name).map(|value| (#key, value)));),
            Kind::Part => quote!(pairs.extend(Part::print(&self.#name));),
            Kind::JsonOnly => quote!(),
        }
    }

    /// The match arm that reads the value of its key.
    fn read(&self) -> Code {
        let name = &self.name;
        match &self.kind {
            Kind::Key(key, _) => {
                let alias = self.alias.as_ref().map(|alias| quote!(| #alias));
                quote!(#key #alias => option::read(value).map(|value| given.#name = value),)
            }
            Kind::Part | Kind::JsonOnly => quote!(),
        }
    }

    /// Takes its keys out of `pairs`, if it is a part.
    fn taken(&self) -> Code {
        let Self { name, ty, .. } = self;
        match &self.kind {
            Kind::Part => quote! {
                let (part, pairs) = <#ty as Part>::take(pairs, Self::OPTION)?;
                given.#name = Some(part);
            },
            Kind::Key(..) | Kind::JsonOnly => quote!(),
        }
    }
}

/// The arguments of `#[options(...)]`: the option, and the overridden struct if there is one.
struct Header(LitStr, Option<Ident>);

impl Parse for Header {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let option = input.parse()?;
        if input.is_empty() {
            return Ok(Self(option, None));
        }
        input.parse::<Token![,]>()?;
        let word: Ident = input.parse()?;
        if word != "over" {
            return Err(Error::new(word.span(), "expected over"));
        }
        input.parse::<Token![=]>()?;
        Ok(Self(option, Some(input.parse()?)))
    }
}

/// The method that merges overrides with their base.
fn overrides(config: &Ident, base: &Ident, settings: &[Setting]) -> Code {
    let merged = settings.iter().map(|Setting { name, overriding, .. }| match overriding {
        Overriding::Own => quote!(merged.#name = self.#name.clone();),
        Overriding::Inherited => quote!(merged.#name = option::Inherit::inherit(&self.#name, &base.#name);),
        Overriding::Apart => quote!(),
    });
    quote! {
        impl #config {
            /// These settings, with those of `base` for inherited ones that are not given, and defaults for the rest.
            fn over_defaults(&self, base: &#base) -> #base {
                let mut merged = <#base as Default>::default();
                #(#merged)*
                merged
            }
        }
    }
}

/// The doc comment as one paragraph.
fn about(attributes: &[Attribute]) -> String {
    let line = |attribute: &Attribute| match &attribute.meta {
        Meta::NameValue(meta) if meta.path.is_ident("doc") => match &meta.value {
            Expr::Lit(syn::ExprLit { lit: Lit::Str(text), .. }) => Some(text.value().trim().to_string()),
            _ => None,
        },
        _ => None,
    };
    attributes.iter().filter_map(line).collect::<Vec<_>>().join(" ")
}

fn fields(input: &DeriveInput) -> Result<&Punctuated<Field, Token![,]>> {
    match &input.data {
        Data::Struct(data) => match &data.fields {
            Fields::Named(fields) => Ok(&fields.named),
            _ => Err(Error::new_spanned(input, "an option is a struct with named fields")),
        },
        _ => Err(Error::new_spanned(input, "an option is a struct")),
    }
}

fn expand(input: &DeriveInput) -> Result<Code> {
    let settings = fields(input)?.iter().map(Setting::of).collect::<Result<Vec<_>>>()?;
    let option = input.attrs.iter().find(|attribute| attribute.path().is_ident("options"));
    let Header(option, base) =
        option.ok_or_else(|| Error::new_spanned(input, "name the option: #[options(\"--net\")]"))?.parse_args()?;
    let config = &input.ident;
    let overrides = base.map(|base| overrides(config, &base, &settings));
    let names: Vec<_> = settings.iter().map(|setting| &setting.name).collect();
    let types: Vec<_> = settings.iter().map(|setting| &setting.ty).collect();
    let given = settings.iter().map(Setting::given);
    let defaults = settings.iter().map(Setting::default);
    let resolved = settings.iter().map(Setting::resolved);
    let described = settings.iter().map(Setting::described);
    let printed = settings.iter().map(Setting::printed);
    let read = settings.iter().map(Setting::read);
    let taken = settings.iter().map(Setting::taken);
    let traits = traits(config);
    Ok(quote! {
        const _: () = {
            use crate::config::error::ConfigError;
            use crate::config::grammar::Pair;
            use crate::config::option::{self, Described, Key, Options, Part, Value};

            /// Values of the command line or JSON, before defaults.
            #[derive(Default, ::serde::Deserialize)]
            #[serde(deny_unknown_fields, expecting = "an object")]
            pub(crate) struct Given {
                #( #given #names: Option<#types>, )*
            }

            impl Default for #config {
                fn default() -> Self {
                    #( let #names: #types = #defaults; )*
                    Self { #(#names,)* }
                }
            }

            impl Options for #config {
                const OPTION: &'static str = #option;

                fn keys() -> Vec<Key> {
                    let default = Self::default();
                    let mut keys = Vec::new();
                    #(#described)*
                    keys
                }
            }

            impl Described for #config {
                type Given = Given;

                fn take_parts(given: &mut Given, pairs: Vec<Pair>) -> Result<Vec<Pair>, ConfigError> {
                    #(#taken)*
                    Ok(pairs)
                }

                fn read_key(given: &mut Given, key: &str, value: &str) -> Option<Result<(), String>> {
                    Some(match key {
                        #(#read)*
                        _ => return None,
                    })
                }

                fn resolve(given: Given) -> Result<Self, ConfigError> {
                    #(#resolved)*
                    Ok(Self { #(#names,)* })
                }

                fn pairs(&self) -> Vec<(&'static str, String)> {
                    let mut pairs = Vec::new();
                    #(#printed)*
                    pairs
                }
            }

            #overrides
            #traits
        };
    })
}

/// The traits of other crates, which need an implementation for each struct.
fn traits(config: &Ident) -> Code {
    quote! {
        impl ::std::str::FromStr for #config {
            type Err = ConfigError;

            fn from_str(text: &str) -> Result<Self, ConfigError> {
                option::parse(text)
            }
        }

        impl ::std::fmt::Display for #config {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                option::print(self, f)
            }
        }

        impl<'de> ::serde::Deserialize<'de> for #config {
            fn deserialize<D: ::serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                option::deserialize(deserializer)
            }
        }
    }
}
