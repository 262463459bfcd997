//! Configuration keys: typed access, and tracking of which were read, so that unknown keys can be named.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value as Json};

use crate::error::FamilyError;

/// A JSON object whose keys are tracked as they are read.
pub struct Keys<'a> {
    place: String,
    prefix: String,
    map: &'a Map<String, Json>,
    names: &'static [(&'static str, &'static str)],
    read: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    /// Wraps an object. `place` names the file in errors; `prefix` is the enclosing key (`rope_scaling.`) or empty.
    pub fn new(place: &str, prefix: &str, map: &'a Map<String, Json>) -> Self {
        Keys { place: place.to_owned(), prefix: prefix.to_owned(), map, names: &[], read: RefCell::default() }
    }

    /// Sets aliases: (requested name, name in this object, which takes precedence).
    pub fn named(self, names: &'static [(&'static str, &'static str)]) -> Self {
        Keys { names, ..self }
    }

    /// Value of a key; null counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Json> {
        let key = self.own(key);
        self.read.borrow_mut().insert(key.to_owned());
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Returns whether the key is present, even if null.
    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(self.own(key))
    }

    /// Marks a key as understood.
    pub fn accept(&self, key: &str) {
        self.read.borrow_mut().insert(key.to_owned());
    }

    /// Reads a non-negative integer.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, FamilyError> {
        // some configurations write integers as 4096.0
        let whole =
            |v: &Json| v.as_u64().or_else(|| v.as_f64().filter(|f| *f >= 0.0 && f.fract() == 0.0).map(|f| f as u64));
        self.typed(key, "a whole number", whole)
    }

    /// Reads a number.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn f64(&self, key: &str) -> Result<Option<f64>, FamilyError> {
        self.typed(key, "a number", |v| v.as_f64().filter(|f| f.is_finite()))
    }

    /// Reads a boolean.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, FamilyError> {
        self.typed(key, "true or false", Json::as_bool)
    }

    /// Reads a string.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn str(&self, key: &str) -> Result<Option<&'a str>, FamilyError> {
        self.typed(key, "a string", Json::as_str)
    }

    /// Reads a list of numbers.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn f64s(&self, key: &str) -> Result<Option<Vec<f64>>, FamilyError> {
        self.typed(key, "a list of numbers", |v| v.as_array()?.iter().map(Json::as_f64).collect())
    }

    /// Reads a list of strings.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, FamilyError> {
        self.typed(key, "a list of strings", |v| v.as_array()?.iter().map(Json::as_str).collect())
    }

    /// Reads a required positive integer.
    ///
    /// # Errors
    /// Returns an error if the value is missing, zero or of another type.
    pub fn size(&self, key: &str) -> Result<u64, FamilyError> {
        let n = self.required(key, self.u64(key)?)?;
        // sizes of real models fit easily; the bound prevents overflow of products
        if n == 0 || n > u64::from(u32::MAX) { Err(self.value(key, "a positive number of 32 bits")) } else { Ok(n) }
    }

    /// Returns the value, or an error that the key is missing.
    ///
    /// # Errors
    /// Returns an error if the value is absent.
    pub fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, FamilyError> {
        value.ok_or_else(|| FamilyError::MissingKey { place: self.place.clone(), key: self.path(key) })
    }

    /// Reads a nested object.
    ///
    /// # Errors
    /// Returns an error if the value has another type.
    pub fn object(&self, key: &str) -> Result<Option<Keys<'a>>, FamilyError> {
        let map = self.typed(key, "an object", Json::as_object)?;
        Ok(map.map(|map| Keys::new(&self.place, &format!("{}.", self.path(key)), map)))
    }

    /// Creates an error about the value of a key.
    pub fn value(&self, key: &str, expected: &str) -> FamilyError {
        FamilyError::Value {
            place: self.place.clone(),
            key: self.path(key),
            found: self.map.get(self.own(key)).map_or_else(|| "absent".into(), shorten),
            expected: expected.to_owned(),
        }
    }

    /// Checks that the values of two keys with one meaning agree, if both are there.
    ///
    /// # Errors
    /// Returns [`FamilyError::Value`] if they differ.
    pub fn check_equal(&self, key: &str, other: &Keys<'_>, other_key: &str) -> Result<(), FamilyError> {
        let given = |map: &Map<String, Json>, key: &str| map.get(key).filter(|value| !value.is_null()).cloned();
        let Some((own, others)) = given(self.map, key).zip(given(other.map, other_key)) else { return Ok(()) };
        if own == others || own.as_f64().is_some_and(|own| others.as_f64() == Some(own)) {
            return Ok(());
        }
        let expected = format!("{}, as in {}{other_key}", shorten(&others), other.prefix);
        let (place, found) = (self.place.clone(), shorten(&own));
        Err(FamilyError::Value { place, key: format!("{}{key}", self.prefix), found, expected })
    }

    /// Checks that every key was read, is neutral, is acknowledged by the user, or has no content (null, false, empty).
    ///
    /// # Errors
    /// Returns the first key that may change the maths and isn't understood.
    pub fn finish(&self, family: &str, neutral: &[&str], acknowledged: &[String]) -> Result<(), FamilyError> {
        for (name, own) in self.names {
            if !acknowledged.contains(&format!("{}{name}", self.prefix)) {
                self.check_equal(name, self, own)?;
            }
        }
        let read = self.read.borrow();
        // a key that an alias replaces is read under the alias
        let shadowed = |key: &str| self.names.iter().any(|(name, own)| *name == key && read.contains(*own));
        for (key, value) in self.map {
            let says_nothing = match value {
                Json::Null | Json::Bool(false) => true,
                Json::Array(a) => a.is_empty(),
                Json::Object(o) => o.is_empty(),
                Json::String(s) => s.is_empty(),
                _ => false,
            };
            let path = format!("{}{key}", self.prefix);
            let known =
                read.contains(key) || shadowed(key) || neutral.contains(&key.as_str()) || acknowledged.contains(&path);
            if !known && !says_nothing {
                return Err(FamilyError::UnknownKey {
                    place: self.place.clone(),
                    key: path,
                    value: shorten(value),
                    family: family.to_owned(),
                });
            }
        }
        Ok(())
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Json) -> Option<T>,
    ) -> Result<Option<T>, FamilyError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => convert(value).map(Some).ok_or_else(|| self.value(key, expected)),
        }
    }

    /// Name under which the object has a key.
    fn own<'k>(&self, key: &'k str) -> &'k str {
        let other = self.names.iter().find(|(name, own)| *name == key && self.map.contains_key(*own));
        other.map_or(key, |(_, own)| *own)
    }

    fn path(&self, key: &str) -> String {
        format!("{}{}", self.prefix, self.own(key))
    }
}

fn shorten(value: &Json) -> String {
    let text = value.to_string();
    if text.chars().count() > 60 { text.chars().take(57).chain("...".chars()).collect() } else { text }
}
