//! `#[derive(Schema)]`: the description of a JSON type, from which `api/openapi.yaml` is generated.

use proc_macro2::TokenStream as Code;
use quote::quote;
use syn::meta::ParseNestedMeta;
use syn::{Attribute, Data, DeriveInput, Error, Expr, Field, Fields, Ident, LitStr, Result, Token, Type, Variant};

use crate::attribute::{self as options, Header, Kind, Use};
use crate::setting::{Setting, about};

/// Attributes of the type.
#[derive(Default)]
struct Container {
    /// The component's name, if it is not the type's.
    name: Option<LitStr>,
    /// Fields that are not supported yet: a variant of `Object`.
    unsupported: Option<Ident>,
    /// True to show the default of an enum.
    shows_default: bool,
    rename_all: Option<String>,
    /// True if all fields have defaults.
    has_defaults: bool,
    /// True if clients send it. A field that may be left out may be null, too.
    is_request: bool,
    /// True if it is an option of the command line, or has the same form.
    is_option: bool,
    /// True if its fields are flattened into other structs, and it has no schema of its own.
    is_part: bool,
}

/// Attributes of a field.
#[derive(Default)]
struct Property {
    /// Text in place of the doc comment, if that is for the command line.
    about: Option<LitStr>,
    /// The described type, if it is not the field's.
    of: Option<Type>,
    /// The name under which the type is described, if it is not the type's own.
    named: Option<LitStr>,
    is_required: bool,
    /// True if its fields are the struct's own.
    is_flat: bool,
    /// An array of the flattened part that must be empty.
    empty: Option<LitStr>,
    rename: Option<LitStr>,
    /// The value if it is left out: of the type, or of this function.
    default: Option<Option<LitStr>>,
    /// Named bounds, before single ones.
    limits: Option<Ident>,
    bounds: Vec<(String, Expr)>,
    items: Vec<(String, Expr)>,
}

/// Attributes of an enum's variant.
#[derive(Default)]
struct Word {
    rename: Option<LitStr>,
    alias: Option<LitStr>,
    is_default: bool,
}

/// Calls `each` for each argument of the attributes `name`.
fn arguments(
    attributes: &[Attribute],
    name: &str,
    mut each: impl FnMut(&str, &ParseNestedMeta<'_>) -> Result<bool>,
) -> Result<()> {
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident(name)) {
        attribute.parse_nested_meta(|meta| {
            let word = meta.path.require_ident()?.to_string();
            if !each(&word, &meta)? && name == "schema" {
                return Err(meta.error("unknown argument of schema"));
            }
            // serde's other arguments do not change the description.
            if meta.input.peek(Token![=]) {
                meta.value()?.parse::<Expr>()?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

impl Container {
    fn of(input: &DeriveInput) -> Result<Self> {
        let mut container = Self::default();
        arguments(&input.attrs, "serde", |word, meta| {
            match word {
                "rename_all" => container.rename_all = Some(meta.value()?.parse::<LitStr>()?.value()),
                "default" => container.has_defaults = true,
                "deny_unknown_fields" => container.is_request = true,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        arguments(&input.attrs, "schema", |word, meta| {
            match word {
                "name" => container.name = Some(meta.value()?.parse()?),
                "unsupported" => container.unsupported = Some(meta.value()?.parse()?),
                "shows_default" => container.shows_default = true,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        if let Some(attribute) = input.attrs.iter().find(|attribute| attribute.path().is_ident("options")) {
            container.is_part = matches!(attribute.parse_args::<Header>()?.usage, Use::Part);
            container.has_defaults = true;
            container.is_request = true;
            container.is_option = true;
        }
        Ok(container)
    }
}

impl Property {
    fn of(field: &Field) -> Result<Self> {
        let mut property = Self::default();
        arguments(&field.attrs, "serde", |word, meta| {
            match word {
                "rename" => property.rename = Some(meta.value()?.parse()?),
                "flatten" => property.is_flat = true,
                "default" if meta.input.peek(Token![=]) => property.default = Some(Some(meta.value()?.parse()?)),
                "default" => property.default = Some(None),
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        arguments(&field.attrs, "schema", |word, meta| {
            match word {
                "about" => property.about = Some(meta.value()?.parse()?),
                "of" => property.of = Some(meta.value()?.parse()?),
                "named" => property.named = Some(meta.value()?.parse()?),
                "required" => property.is_required = true,
                "empty" => property.empty = Some(meta.value()?.parse()?),
                "limits" => property.limits = Some(meta.value()?.parse()?),
                "items" => meta.parse_nested_meta(|item| {
                    let word = item.path.require_ident()?.to_string();
                    property.items.push((keyword(&word), item.value()?.parse()?));
                    Ok(())
                })?,
                word if meta.input.peek(Token![=]) => {
                    property.bounds.push((keyword(word), meta.value()?.parse()?));
                }
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        Ok(property)
    }
}

/// The keyword of a bound: `min_length` is `minLength`.
fn keyword(word: &str) -> String {
    let mut parts = word.split('_');
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |keyword, part| keyword + &part[..1].to_uppercase() + &part[1..])
}

/// True if the type is an `Option`.
fn is_option(ty: &Type) -> bool {
    matches!(ty, Type::Path(path) if path.path.segments.last().is_some_and(|segment| segment.ident == "Option"))
}

/// The statement that adds a field to `definition`.
fn field(field: &Field, container: &Container) -> Result<Code> {
    let setting = Setting::of(field)?;
    let property = Property::of(field)?;
    let (name, ty) = (&setting.name, property.of.as_ref().unwrap_or(&setting.ty));
    if property.is_flat || matches!(setting.kind, Kind::Flatten) {
        let empty = property.empty.iter().map(|field| quote!(definition.limit(#field, "maxItems", 0);));
        return Ok(quote!(definition.include(<#ty as Component>::define(components)); #(#empty)*));
    }
    let written = property.rename.as_ref().map_or_else(|| name.to_string(), LitStr::value);
    let read = [container.is_option.then(|| name.to_string()), setting.alias.as_ref().map(LitStr::value)];
    let others = read.into_iter().flatten().filter(|other| *other != written);
    let default = default_of(&setting, &property, container);
    let is_required = property.is_required
        || match setting.default {
            options::Default::Required => true,
            _ => !container.has_defaults && property.default.is_none() && !is_option(&setting.ty),
        };
    let is_nullable = container.is_request && !is_required;
    let mut about = property.about.as_ref().map_or_else(|| setting.about.clone(), LitStr::value);
    if matches!(&setting.kind, Kind::Key(_, syntax) if syntax.starts_with("<bytes>[")) && property.about.is_none() {
        about += " In bytes.";
    }
    let schema = match &property.named {
        Some(name) => quote!(components.named::<#ty>(#name, #about)),
        None => quote!(<#ty as Schema>::describe(components)),
    };
    let limits = property.limits.map_or_else(|| quote!(&[]), |limits| quote!(crate::schema::#limits));
    let bounds = property.bounds.iter().map(|(word, value)| quote!((#word, Value::from(#value))));
    let items = property.items.iter().map(|(word, value)| quote!((#word, Value::from(#value))));
    Ok(quote! {
        let schema = #schema;
        definition.add(Property {
            name: #written,
            others: &[#(#others),*],
            about: #about,
            is_required: #is_required,
            is_nullable: #is_nullable,
            default: #default,
            limits: #limits,
            bounds: vec![#(#bounds),*],
            items: vec![#(#items),*],
            schema,
        });
    })
}

/// The value of a field that is left out, as an `Option` of JSON.
fn default_of(setting: &Setting, property: &Property, container: &Container) -> Code {
    let (name, ty) = (&setting.name, &setting.ty);
    match (&setting.default, &property.default) {
        _ if !container.is_request || property.is_required => quote!(None),
        (options::Default::Required | options::Default::From(_), _) => quote!(None),
        (_, Some(None)) => quote!(value_of(&<#ty as ::std::default::Default>::default())),
        (_, Some(Some(function))) => {
            let function = Ident::new(&function.value(), function.span());
            quote!(value_of(&#function()))
        }
        _ if container.has_defaults => quote!(value_of(&<Self as ::std::default::Default>::default().#name)),
        _ => quote!(None),
    }
}

/// The value of an enum as a pair of its words and its meaning.
fn word(variant: &Variant, container: &Container) -> Result<(Code, Option<String>)> {
    let mut word = Word::default();
    arguments(&variant.attrs, "serde", |name, meta| {
        match name {
            "rename" => word.rename = Some(meta.value()?.parse()?),
            "alias" => word.alias = Some(meta.value()?.parse()?),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    word.is_default = variant.attrs.iter().any(|attribute| attribute.path().is_ident("default"));
    let name = variant.ident.to_string();
    let text = match (&word.rename, container.rename_all.as_deref()) {
        (Some(rename), _) => rename.value(),
        (None, None) => name,
        (None, Some("lowercase")) => name.to_lowercase(),
        (None, Some("kebab-case")) => kebab(&name),
        (None, Some(_)) => {
            return Err(Error::new_spanned(variant, "the description supports lowercase and kebab-case"));
        }
    };
    let (about, alias) = (about(&variant.attrs), word.alias.as_ref().map(LitStr::value));
    let default = (word.is_default && container.shows_default).then(|| text.clone());
    Ok((quote!((&[#text, #alias][..], #about)), default))
}

/// The name in lower case, with a hyphen before each word but the first.
fn kebab(name: &str) -> String {
    let mut text = String::new();
    for (index, letter) in name.chars().enumerate() {
        if letter.is_uppercase() && index > 0 {
            text.push('-');
        }
        text.extend(letter.to_lowercase());
    }
    text
}

/// The body of `define`.
fn body(input: &DeriveInput, container: &Container) -> Result<Code> {
    let about = about(&input.attrs);
    let unsupported = container
        .unsupported
        .iter()
        .map(|object| quote!(definition.add_unsupported(crate::config::unsupported::Object::#object.schemas());));
    match &input.data {
        Data::Struct(data) => {
            let Fields::Named(fields) = &data.fields else {
                return Err(Error::new_spanned(input, "only a struct with named fields is an object"));
            };
            let fields = fields.named.iter().map(|one| field(one, container)).collect::<Result<Vec<_>>>()?;
            Ok(quote! {
                let mut definition = Definition::object(Self::NAME, #about);
                #(#fields)*
                #(#unsupported)*
                definition
            })
        }
        Data::Enum(data) if data.variants.iter().all(|variant| matches!(variant.fields, Fields::Unit)) => {
            let words = data.variants.iter().map(|variant| word(variant, container)).collect::<Result<Vec<_>>>()?;
            let default = words.iter().find_map(|(_, default)| default.clone());
            let default = default.map_or_else(|| quote!(None), |default| quote!(Some(#default)));
            let words = words.iter().map(|(word, _)| word);
            Ok(quote!(Definition::words(Self::NAME, #about, &[#(#words),*], #default)))
        }
        Data::Enum(data) if data.variants.len() == 1 => tagged(&data.variants[0], &about),
        _ => Err(Error::new_spanned(input, "describe this type by hand: implement Schema")),
    }
}

/// The body of `define` for an enum whose only variant has a value: an object with one field.
fn tagged(variant: &Variant, about: &str) -> Result<Code> {
    let Fields::Unnamed(fields) = &variant.fields else {
        return Err(Error::new_spanned(variant, "describe this type by hand: implement Schema"));
    };
    let (name, ty) = (variant.ident.to_string(), &fields.unnamed[0].ty);
    Ok(quote! {
        let mut definition = Definition::object(Self::NAME, #about);
        let schema = <#ty as Schema>::describe(components);
        definition.add(Property::required(#name, schema));
        definition
    })
}

pub(crate) fn expand(input: &DeriveInput) -> Result<Code> {
    let container = Container::of(input)?;
    let ty = &input.ident;
    let name = container.name.as_ref().map_or_else(|| ty.to_string(), LitStr::value);
    let body = body(input, &container)?;
    let schema = (!container.is_part).then(|| {
        quote! {
            impl Schema for #ty {
                fn describe(components: &mut Components) -> Value {
                    components.reference::<Self>()
                }
            }
        }
    });
    Ok(quote! {
        const _: () = {
            #[allow(unused_imports, reason = "an enum has no properties")]
            use crate::schema::{Component, Components, Definition, Property, Schema, value_of};
            #[allow(unused_imports, reason = "few properties have bounds")]
            use ::serde_json::Value;

            #schema

            impl Component for #ty {
                const NAME: &'static str = #name;

                #[allow(unused_variables, reason = "an enum refers to no other type")]
                fn define(components: &mut Components) -> Definition {
                    #body
                }
            }
        };
    })
}
