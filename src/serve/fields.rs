//! Names of the fields of a deserialized type, as its `Deserialize` knows them.

use serde::Deserialize;
use serde::de::value::Error;
use serde::de::{Deserializer, Error as _, Visitor};
use serde::forward_to_deserialize_any;

/// Returns the fields of a struct without flattened ones, including aliases.
pub(super) fn names<'de, T: Deserialize<'de>>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    // the deserializer only records the names and fails
    drop(T::deserialize(Names(&mut names)));
    names
}

struct Names<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Names<'_> {
    type Error = Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        *self.0 = fields;
        Err(Error::custom("only names are of interest"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("this is no struct"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_aliases_are_found() {
        #[derive(Deserialize)]
        struct Sample {
            #[serde(alias = "b", alias = "c")]
            _a: Option<u32>,
            #[serde(rename = "e")]
            _d: Option<u32>,
        }
        let mut found = names::<Sample>().to_vec();
        found.sort_unstable();
        assert_eq!(found, ["_a", "b", "c", "e"]);
        assert!(names::<u32>().is_empty());
    }
}
