//! Features of a package's functions, as described.

use std::fmt;

use coreml_proto::array_feature_type::ShapeFlexibility;
use coreml_proto::feature_type::Type;
use coreml_proto::{ArrayFeatureType, FeatureDescription, FunctionDescription};
use serde::Serialize;

use super::features;
use anec_mil::DataType;

/// Features of one function, as described.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Interface {
    /// Function.
    pub function: String,
    /// Inputs in order, without states.
    pub inputs: Vec<Feature>,
    /// Outputs in order.
    pub outputs: Vec<Feature>,
    /// States.
    pub states: Vec<Feature>,
}

/// Input, output or state of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Feature {
    /// Name.
    pub name: String,
    /// Description, if there is one.
    pub description: String,
    /// Kind, in the format's terms: `multiArrayType`, `imageType`, …; states are `stateType`.
    pub kind: &'static str,
    /// Element type of a multi-array; `None` for other kinds and for unknown types.
    #[serde(serialize_with = "serialize_data_type")]
    pub dtype: Option<DataType>,
    /// Default shape of a multi-array.
    pub shape: Vec<i64>,
    /// Other allowed shapes.
    pub flexibility: Flexibility,
    /// Whether the feature is optional.
    pub optional: bool,
}

/// Allowed shapes of a feature.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Flexibility {
    /// Default shape only.
    #[default]
    Fixed,
    /// Lower bound and optional upper bound of each dimension.
    Ranges(Vec<(u64, Option<u64>)>),
    /// List of shapes.
    Enumerated(Vec<Vec<i64>>),
}

fn serialize_data_type<S: serde::Serializer>(dtype: &Option<DataType>, serializer: S) -> Result<S::Ok, S::Error> {
    dtype.map(DataType::name).serialize(serializer)
}

impl Interface {
    pub(super) fn from_proto(description: &FunctionDescription) -> Self {
        let features = |list: &[FeatureDescription]| list.iter().map(Feature::from_proto).collect();
        Interface {
            function: description.name.clone(),
            inputs: features(&description.input),
            outputs: features(&description.output),
            states: features(&description.state),
        }
    }
}

impl Feature {
    fn from_proto(feature: &FeatureDescription) -> Self {
        let ty = feature.r#type.as_ref();
        let mut out = Feature {
            name: feature.name.clone(),
            description: feature.short_description.clone(),
            kind: "none",
            dtype: None,
            shape: Vec::new(),
            flexibility: Flexibility::Fixed,
            optional: ty.is_some_and(|t| t.is_optional),
        };
        out.kind = match ty.and_then(|t| t.r#type.as_ref()) {
            None => "none",
            Some(Type::Int64Type(_)) => "int64Type",
            Some(Type::DoubleType(_)) => "doubleType",
            Some(Type::StringType(_)) => "stringType",
            Some(Type::ImageType(_)) => "imageType",
            Some(Type::DictionaryType(_)) => "dictionaryType",
            Some(Type::SequenceType(_)) => "sequenceType",
            Some(Type::MultiArrayType(array)) => {
                out.set_array(array);
                "multiArrayType"
            }
            Some(Type::StateType(state)) => {
                if let Some(coreml_proto::state_feature_type::Type::ArrayType(array)) = &state.r#type {
                    out.set_array(array);
                }
                "stateType"
            }
        };
        out
    }

    fn set_array(&mut self, array: &ArrayFeatureType) {
        self.dtype = features::data_type(array);
        self.shape.clone_from(&array.shape);
        self.flexibility = match &array.shape_flexibility {
            None => Flexibility::Fixed,
            Some(ShapeFlexibility::ShapeRange(ranges)) => {
                let bounds = |r: &coreml_proto::SizeRange| (r.lower_bound, u64::try_from(r.upper_bound).ok());
                Flexibility::Ranges(ranges.size_ranges.iter().map(bounds).collect())
            }
            Some(ShapeFlexibility::EnumeratedShapes(shapes)) => {
                Flexibility::Enumerated(shapes.shapes.iter().map(|s| s.shape.clone()).collect())
            }
        };
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dtype {
            Some(dtype) => write!(f, "{dtype} {:?}", self.shape)?,
            None => f.write_str(self.kind)?,
        }
        match &self.flexibility {
            Flexibility::Fixed => Ok(()),
            Flexibility::Ranges(ranges) => {
                let range = |(lower, upper): &(u64, Option<u64>)| match upper {
                    Some(upper) if upper == lower => lower.to_string(),
                    Some(upper) => format!("{lower}..{upper}"),
                    None => format!("{lower}.."),
                };
                write!(f, " of [{}]", ranges.iter().map(range).collect::<Vec<_>>().join(", "))
            }
            Flexibility::Enumerated(shapes) => write!(f, " of {shapes:?}"),
        }
    }
}
