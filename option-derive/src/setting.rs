//! A field of the struct, and the code that it adds to each method of `Fields` and `Changes`.

use proc_macro2::TokenStream as Code;
use quote::quote;
use syn::{Attribute, Error, Expr, ExprPath, Field, Ident, Lit, LitStr, Meta, Result, Type};

use crate::attribute::{About, Arguments, Change, Default, Kind, Overriding};

/// Field of the struct.
pub(crate) struct Setting {
    pub name: Ident,
    pub ty: Type,
    pub overriding: Overriding,
    pub about: String,
    pub kind: Kind,
    pub default: Default,
    pub alias: Option<LitStr>,
    bare: bool,
    change: Option<Change>,
    abouts: About,
    attributes: Vec<Attribute>,
    /// The least and the highest value, by the attribute of `Schema`.
    bounds: [Option<u64>; 2],
}

impl Setting {
    pub(crate) fn of(field: &Field) -> Result<Self> {
        let name = field.ident.clone().ok_or_else(|| Error::new_spanned(field, "a field has a name"))?;
        let attribute = field.attrs.iter().find(|attribute| attribute.path().is_ident("option"));
        let arguments = attribute.map_or_else(|| Ok(Arguments::none()), Attribute::parse_args)?;
        let Arguments { kind, default, overriding, alias, bare, change, about: abouts } = arguments;
        if change.is_some() && !matches!(kind, Kind::Key(..)) {
            return Err(Error::new_spanned(field, "only a key can be an argument: give \"key=<syntax>\", too"));
        }
        let (ty, about, attributes) = (field.ty.clone(), about(&field.attrs), field.attrs.clone());
        let bounds = bounds(&attributes)?;
        Ok(Self { name, ty, overriding, about, kind, default, alias, bare, change, abouts, attributes, bounds })
    }

    /// True if its fields are also those of the struct.
    pub(crate) fn is_flattened(&self) -> bool {
        matches!(self.kind, Kind::Flatten)
    }

    fn field(&self) -> String {
        self.name.to_string()
    }

    /// Type of the field before defaults.
    pub(crate) fn given(&self) -> Code {
        let ty = &self.ty;
        if self.is_flattened() { quote!(<#ty as Fields>::Given) } else { quote!(Option<#ty>) }
    }

    /// A list of its names in JSON: as many as it has fields or aliases.
    pub(crate) fn names(&self) -> Code {
        let (ty, field) = (&self.ty, self.field());
        match &self.alias {
            _ if self.is_flattened() => quote!(<#ty as Fields>::FIELDS),
            // As of serde, whose names are sorted.
            Some(alias) if alias.value() < field => quote!(&[#alias, #field]),
            Some(alias) => quote!(&[#field, #alias]),
            None => quote!(&[#field]),
        }
    }

    /// The default value. A required field needs one only in `Default`.
    pub(crate) fn default(&self) -> Code {
        match &self.default {
            Default::Value(value) | Default::From(value) => quote!(#value),
            Default::OfType | Default::Required => quote!(::std::default::Default::default()),
        }
    }

    /// Assigns the given value or the default to a variable: `let field = ...`.
    pub(crate) fn resolved(&self) -> Code {
        let Self { name, ty, .. } = self;
        if self.is_flattened() {
            return quote!(let #name = <#ty as Fields>::resolve(given.#name)?;);
        }
        let otherwise = match self.default {
            Default::Required => quote!(return Err(stringify!(#name))),
            _ => self.default(),
        };
        quote!(let #name: #ty = match given.#name { Some(value) => value, None => #otherwise };)
    }

    /// The match arm that reads it from JSON.
    pub(crate) fn read_field(&self) -> Code {
        let (name, field) = (&self.name, self.field());
        let alias = self.alias.as_ref().map(|alias| quote!(| #alias));
        match self.kind {
            Kind::Flatten => quote!(),
            Kind::Key(..) => {
                let bounds = self.bounds();
                quote!(#field #alias => option::read_number(&mut given.#name, #field, object, #bounds).map(|()| true),)
            }
            _ => quote!(#field #alias => option::read_field(&mut given.#name, #field, object).map(|()| true),),
        }
    }

    /// Reads it from JSON if it is a field of the flattened part.
    pub(crate) fn read_part_field(&self) -> Code {
        let Self { name, ty, .. } = self;
        if !self.is_flattened() {
            return quote!();
        }
        quote! {
            if <#ty as Fields>::read_field(&mut given.#name, name, object)? {
                return Ok(true);
            }
        }
    }

    /// The match arm with its keys, for the help.
    pub(crate) fn keys(&self) -> Code {
        let Self { name, ty, about, bare, .. } = self;
        let field = self.field();
        match &self.kind {
            Kind::Key(key, syntax) => {
                let default = match self.default {
                    Default::Value(_) | Default::OfType => quote!(Value::print(&Self::default().#name)),
                    Default::From(_) | Default::Required => quote!(None),
                };
                let about = quote!(#about.to_string());
                let key = quote!(Key { name: #key, syntax: #syntax, default: #default, about: #about, is_bare: #bare });
                quote!(#field => vec![#key],)
            }
            Kind::Part => quote!(#field => <#ty as Part>::keys(),),
            Kind::Flatten | Kind::JsonOnly => quote!(),
        }
    }

    /// Adds the keys of `field` to `keys`, if it is one of the flattened part.
    pub(crate) fn part_keys(&self) -> Code {
        let ty = &self.ty;
        if !self.is_flattened() {
            return quote!();
        }
        let about = match &self.abouts {
            About::All(text) => quote!(key.about = #text.to_string()),
            About::Some(texts) => {
                let arms = texts.iter().map(|(key, text)| {
                    let key = key.to_string();
                    quote!(#key => key.about = #text.to_string(),)
                });
                quote!(match key.name { #(#arms)* _ => {} })
            }
        };
        quote! {
            keys.extend(<#ty as Fields>::keys_of(field).into_iter().map(|mut key: Key| {
                #about;
                key
            }));
        }
    }

    /// The match arm with its keys and values.
    pub(crate) fn pairs(&self) -> Code {
        let (name, field) = (&self.name, self.field());
        match &self.kind {
            Kind::Key(key, _) => {
                quote!(#field => Value::print(&self.#name).map(|value| (#key, value)).into_iter().collect(),)
            }
            Kind::Part => quote!(#field => Part::print(&self.#name),),
            Kind::Flatten | Kind::JsonOnly => quote!(),
        }
    }

    /// Adds the key and value of `field` to `pairs`, if it is one of the flattened part.
    pub(crate) fn part_pairs(&self) -> Code {
        let name = &self.name;
        if self.is_flattened() { quote!(pairs.extend(Fields::pairs_of(&self.#name, field));) } else { quote!() }
    }

    /// Bounds of the number that it may be, and its unit.
    fn bounds(&self) -> Code {
        let Kind::Key(_, syntax) = &self.kind else { return quote!() };
        let bound = |bound: Option<u64>| match bound {
            Some(bound) => quote!(Some(#bound)),
            None => quote!(None),
        };
        let [minimum, maximum] = self.bounds.map(bound);
        quote!(value::Bounds { minimum: #minimum, maximum: #maximum, syntax: #syntax })
    }

    /// The match arm that reads the value of its key.
    pub(crate) fn read_key(&self) -> Code {
        let name = &self.name;
        match &self.kind {
            Kind::Key(key, _) => {
                let alias = self.alias.as_ref().map(|alias| quote!(| #alias));
                let bounds = self.bounds();
                quote!(#key #alias => Some(
                    value::read(text).map(|value| given.#name = value).map_err(|what| #bounds.explain(what))
                ),)
            }
            Kind::Part | Kind::Flatten | Kind::JsonOnly => quote!(),
        }
    }

    /// Reads the value if the key is one of the flattened part.
    pub(crate) fn read_part_key(&self) -> Code {
        let Self { name, ty, .. } = self;
        if !self.is_flattened() {
            return quote!();
        }
        quote! {
            if let Some(read) = <#ty as Fields>::read_key(&mut given.#name, key, text) {
                return Some(read);
            }
        }
    }

    /// Takes its keys out of `pairs`, if it is a part.
    pub(crate) fn taken(&self) -> Code {
        let Self { name, ty, .. } = self;
        match &self.kind {
            Kind::Part => quote! {
                let (part, pairs) = <#ty as Part>::take(pairs, option)?;
                given.#name = Some(part);
            },
            Kind::Flatten => quote!(let pairs = <#ty as Fields>::take_parts(&mut given.#name, pairs, option)?;),
            Kind::Key(..) | Kind::JsonOnly => quote!(),
        }
    }

    /// The match arm that adds it to a JSON object.
    pub(crate) fn written(&self) -> Code {
        let (name, field) = (&self.name, self.field());
        let write = quote!(object.serialize_entry(#field, &self.#name)?);
        match skipped(&self.attributes) {
            _ if self.is_flattened() => quote!(),
            Ok(Some(skipped)) => quote!(#field => if !#skipped(&self.#name) { #write },),
            Ok(None) => quote!(#field => #write,),
            Err(error) => error.into_compile_error(),
        }
    }

    /// Adds `field` to a JSON object, if it is one of the flattened part.
    pub(crate) fn part_written(&self) -> Code {
        let name = &self.name;
        if self.is_flattened() { quote!(Written::write_field(&self.#name, field, object)?;) } else { quote!() }
    }

    /// The match arm with the argument that changes it.
    pub(crate) fn argument(&self) -> Code {
        let (ty, field) = (&self.ty, self.field());
        match (&self.kind, &self.change) {
            (Kind::Key(key, _), Some(Change { value_name, about })) => {
                let long = key.replace('_', "-");
                let of_key = key.to_uppercase();
                let value_name = value_name.as_ref().map_or_else(|| quote!(#of_key), |value| quote!(#value));
                let rest = quote!(value_name: #value_name, about: #about, form: <#ty as Value>::FORM);
                quote!(#field => Some(Argument { name: #key, long: #long, #rest }),)
            }
            _ => quote!(),
        }
    }

    /// Returns the argument of `field`, if it is one of the flattened part.
    pub(crate) fn part_argument(&self) -> Code {
        let ty = &self.ty;
        if !self.is_flattened() {
            return quote!();
        }
        quote! {
            if let Some(argument) = <#ty as Changes>::argument(field) {
                return Some(argument);
            }
        }
    }

    /// The match arm that sets it to the value of its argument.
    pub(crate) fn set(&self) -> Code {
        let name = &self.name;
        match (&self.kind, &self.change) {
            (Kind::Key(key, _), Some(_)) => {
                let bounds = self.bounds();
                quote!(#key => Some(
                    Value::parse(text).map(|value| self.#name = value).map_err(|what| #bounds.explain(what))
                ),)
            }
            _ => quote!(),
        }
    }

    /// Sets the field of the flattened part that the argument changes.
    pub(crate) fn set_part(&self) -> Code {
        let name = &self.name;
        if !self.is_flattened() {
            return quote!();
        }
        quote! {
            if let Some(set) = Changes::set(&mut self.#name, argument, text) {
                return Some(set);
            }
        }
    }

    /// Sets the field of `settings` to this one if it is given, and notes that in `changed`.
    pub(crate) fn applied(&self) -> Code {
        let name = &self.name;
        match &self.change {
            Some(_) => quote!(changed |= option::apply(#name, &mut settings.#name);),
            None if self.is_flattened() => quote!(changed |= Changes::apply(#name, &mut settings.#name);),
            None => quote!(_ = #name;),
        }
    }
}

/// The `minimum` and `maximum` of `#[schema(...)]`.
fn bounds(attributes: &[Attribute]) -> Result<[Option<u64>; 2]> {
    let mut bounds = [None, None];
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("schema")) {
        attribute.parse_nested_meta(|meta| {
            if meta.input.peek(syn::token::Paren) {
                let inner;
                syn::parenthesized!(inner in meta.input);
                return inner.parse::<Code>().map(drop);
            }
            if !meta.input.peek(syn::Token![=]) {
                return Ok(());
            }
            let Expr::Lit(syn::ExprLit { lit: Lit::Int(value), .. }) = meta.value()?.parse()? else { return Ok(()) };
            for (name, bound) in ["minimum", "maximum"].into_iter().zip(&mut bounds) {
                if meta.path.is_ident(name) {
                    *bound = Some(value.base10_parse::<u64>()?);
                }
            }
            Ok(())
        })?;
    }
    Ok(bounds)
}

/// The function that `#[serde(skip_serializing_if = "...")]` names, if there is one.
fn skipped(attributes: &[Attribute]) -> Result<Option<ExprPath>> {
    let mut skipped = None;
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("serde")) {
        attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("skip_serializing_if") {
                return Err(meta.error("a part, and a struct with one, know only skip_serializing_if"));
            }
            let name: LitStr = meta.value()?.parse()?;
            skipped = Some(name.parse()?);
            Ok(())
        })?;
    }
    Ok(skipped)
}

/// The doc comment as one paragraph.
pub(crate) fn about(attributes: &[Attribute]) -> String {
    let line = |attribute: &Attribute| match &attribute.meta {
        Meta::NameValue(meta) if meta.path.is_ident("doc") => match &meta.value {
            Expr::Lit(syn::ExprLit { lit: Lit::Str(text), .. }) => Some(text.value().trim().to_string()),
            _ => None,
        },
        _ => None,
    };
    attributes.iter().filter_map(line).collect::<Vec<_>>().join(" ")
}
