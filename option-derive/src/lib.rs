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
//! | `#[option(part)]` | the field has several keys of its own, and is an object in JSON (`Part`) |
//! | `#[option(flatten)]` | the field's own fields are fields of this struct, in JSON, too |
//! | `about = "<help>"`, `about(<key> = "<help>")` | other help for all or some keys of a flattened field |
//! | `change("<value>", "<help>")` | an argument of `ch-remote` changes the field; `<value>` may be left out |
//! | `bare` | a value without a key is most likely meant for this one |
//! | `inherited`, `apart` | see below |
//!
//! `#[options(part)]` makes the struct one whose fields are flattened into those of options, and `#[options(body)]` the
//! body of a request, which is only JSON. With `changes`, it also has what the fields' `change` is about. Fields and
//! keys have the order of the struct, with flattened ones in their place. `order = <constant>` names those that come
//! first instead.
//!
//! `#[options("--net-vf", over = NetConfig)]` makes the struct one of overrides: `over_defaults(&self, base)` is a
//! `NetConfig` with this struct's fields. An `inherited` field that is `None` has the base's value; an `apart` field is
//! not in the base.
//!
//! The derive implements `Default` and `Fields`, and for an option `Deserialize`, `FromStr`, `Display` and `Options`.
//! It generates the code that differs between structs; shared code is ordinary code in `vm-api/src/config/option.rs`.
//! `Serialize` is serde's own, except for parts and structs with a flattened field, whose `Serialize` knows only
//! `#[serde(skip_serializing_if = "...")]`.
//!
//! `#[derive(Schema)]` is for all types of the API's JSON, options or not: it describes them for `api/openapi.yaml`,
//! with the doc comments as descriptions. It reads serde's attributes, those above, and its own:
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
//! | `empty = "<field>"` | an array of the flattened part that must be empty here |
//! | `named = "<name>"` | a second schema of the field's type, described by the field's doc comment |

mod attribute;
mod schema;
mod setting;

use proc_macro::TokenStream;
use proc_macro2::TokenStream as Code;
use quote::quote;
use syn::punctuated::Punctuated;
use syn::{Data, DeriveInput, Error, Field, Fields, Ident, Result, Token};

use attribute::{Header, Overriding, Use};
use setting::Setting;

/// Derives an option of the command line; see the crate's documentation.
#[proc_macro_derive(Options, attributes(options, option, serde))]
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
    let header = input.attrs.iter().find(|attribute| attribute.path().is_ident("options"));
    let header: Header =
        header.ok_or_else(|| Error::new_spanned(input, "name the option: #[options(\"--net\")]"))?.parse_args()?;
    let config = &input.ident;
    let names: Vec<_> = settings.iter().map(|setting| &setting.name).collect();
    let given = settings.iter().map(Setting::given);
    let types = settings.iter().map(|setting| &setting.ty);
    let defaults = settings.iter().map(Setting::default);
    let fields = of_fields(config, &header, &settings);
    let is_part = matches!(header.usage, Use::Part);
    let json = (is_part || settings.iter().any(Setting::is_flattened)).then(|| serialize(config, &settings));
    let changes = header.changes.then(|| changes(config, &settings));
    let usage = match header.usage {
        Use::Option(option, base) => {
            let overrides = base.map(|base| overrides(config, &base, &settings));
            let option = of_option(config, &option);
            quote!(#option #overrides)
        }
        Use::Body => deserialize(config, &quote!(option::deserialize_body)),
        Use::Part => quote!(),
    };
    Ok(quote! {
        const _: () = {
            use crate::config::error::ConfigError;
            use crate::config::grammar::Pair;
            use crate::config::keys::Key;
            use crate::config::option::{self, Argument, Changes, Fields, Options, Part, Written};
            use crate::config::value::{self, Value};

            /// Values of the command line or JSON, before defaults.
            #[derive(Default)]
            pub(crate) struct Given {
                #( #names: #given, )*
            }

            impl Default for #config {
                fn default() -> Self {
                    #( let #names: #types = #defaults; )*
                    Self { #(#names,)* }
                }
            }

            #fields
            #json
            #changes
            #usage
        };
    })
}

/// The implementation of `Fields`.
fn of_fields(config: &Ident, header: &Header, settings: &[Setting]) -> Code {
    let first = header.order.as_ref().map_or_else(|| quote!(&[]), |order| quote!(#order));
    let names = settings.iter().map(|setting| &setting.name);
    let groups = settings.iter().map(Setting::names);
    let resolved = settings.iter().map(Setting::resolved);
    let (keys, part_keys) = (settings.iter().map(Setting::keys), settings.iter().map(Setting::part_keys));
    let (pairs, part_pairs) = (settings.iter().map(Setting::pairs), settings.iter().map(Setting::part_pairs));
    let (read, read_part) = (settings.iter().map(Setting::read_field), settings.iter().map(Setting::read_part_field));
    let (read_key, read_part_key) =
        (settings.iter().map(Setting::read_key), settings.iter().map(Setting::read_part_key));
    let taken = settings.iter().map(Setting::taken);
    quote! {
        const GROUPS: &[&[&str]] = &[#(#groups,)*];
        const NAMES: [&str; option::count(GROUPS)] = option::in_order(GROUPS, #first);

        impl Fields for #config {
            const FIELDS: &'static [&'static str] = &NAMES;

            type Given = Given;

            fn read_field<'de, A: ::serde::de::MapAccess<'de>>(
                given: &mut Given,
                name: &str,
                object: &mut A,
            ) -> Result<bool, A::Error> {
                match name {
                    #(#read)*
                    _ => {
                        #(#read_part)*
                        Ok(false)
                    }
                }
            }

            fn take_parts(given: &mut Given, pairs: Vec<Pair>, option: &str) -> Result<Vec<Pair>, ConfigError> {
                #(#taken)*
                Ok(pairs)
            }

            fn read_key(given: &mut Given, key: &str, text: &str) -> Option<Result<(), String>> {
                match key {
                    #(#read_key)*
                    _ => {
                        #(#read_part_key)*
                        None
                    }
                }
            }

            fn resolve(given: Given) -> Result<Self, &'static str> {
                #(#resolved)*
                Ok(Self { #(#names,)* })
            }

            fn keys_of(field: &str) -> Vec<Key> {
                match field {
                    #(#keys)*
                    _ => {
                        let mut keys = Vec::new();
                        #(#part_keys)*
                        keys
                    }
                }
            }

            fn pairs_of(&self, field: &str) -> Vec<(&'static str, String)> {
                match field {
                    #(#pairs)*
                    _ => {
                        let mut pairs = Vec::new();
                        #(#part_pairs)*
                        pairs
                    }
                }
            }
        }
    }
}

/// The implementation of `Changes`.
fn changes(config: &Ident, settings: &[Setting]) -> Code {
    let names = settings.iter().map(|setting| &setting.name);
    let (arguments, part_arguments) =
        (settings.iter().map(Setting::argument), settings.iter().map(Setting::part_argument));
    let (set, set_part) = (settings.iter().map(Setting::set), settings.iter().map(Setting::set_part));
    let applied = settings.iter().map(Setting::applied);
    quote! {
        impl Changes for #config {
            fn argument(field: &str) -> Option<Argument> {
                match field {
                    #(#arguments)*
                    _ => {
                        #(#part_arguments)*
                        None
                    }
                }
            }

            fn set(&mut self, argument: &str, text: &str) -> Option<Result<(), String>> {
                match argument {
                    #(#set)*
                    _ => {
                        #(#set_part)*
                        None
                    }
                }
            }

            fn apply(&self, settings: &mut Self) -> bool {
                let Self { #(#names,)* } = self;
                let mut changed = false;
                #(#applied)*
                changed
            }
        }
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

/// The implementation of `Serialize` for a part, or a struct with one.
fn serialize(config: &Ident, settings: &[Setting]) -> Code {
    let (written, part_written) = (settings.iter().map(Setting::written), settings.iter().map(Setting::part_written));
    quote! {
        impl Written for #config {
            fn write_field<M: ::serde::ser::SerializeMap>(&self, field: &str, object: &mut M) -> Result<(), M::Error> {
                match field {
                    #(#written)*
                    _ => {
                        #(#part_written)*
                    }
                }
                Ok(())
            }
        }

        impl ::serde::Serialize for #config {
            fn serialize<S: ::serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                option::serialize(self, serializer)
            }
        }
    }
}

/// The traits of an option, which need an implementation for each struct.
fn of_option(config: &Ident, option: &syn::LitStr) -> Code {
    let deserialize = deserialize(config, &quote!(option::deserialize));
    quote! {
        impl Options for #config {
            const OPTION: &'static str = #option;

            fn keys() -> Vec<Key> {
                option::keys::<Self>()
            }
        }

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

        #deserialize
    }
}

fn deserialize(config: &Ident, function: &Code) -> Code {
    quote! {
        impl<'de> ::serde::Deserialize<'de> for #config {
            fn deserialize<D: ::serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                #function(deserializer)
            }
        }
    }
}
