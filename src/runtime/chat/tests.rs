use super::*;

#[test]
fn messages_are_read_as_the_api_has_them() {
    let read = |json: Json| serde_json::from_value::<Message>(json);
    let parts = serde_json::json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let message = read(serde_json::json!({"role": "user", "content": parts})).unwrap();
    assert_eq!(message, Message::new("user", "ab"));
    let call = serde_json::json!({"role": "assistant", "content": null, "tool_calls": []});
    assert_eq!(read(call.clone()).unwrap().content, None);
    assert_eq!(serde_json::to_value(read(call.clone()).unwrap()).unwrap(), call);
    let image = serde_json::json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]});
    assert!(read(image).unwrap_err().to_string().contains("only text is understood"));
    assert!(read(serde_json::json!({"content": "x"})).is_err(), "somebody must speak");
}

#[test]
fn tools_and_variables_reach_the_template() {
    let source = "{% if tools %}{{ tools[0].function.name }} {% endif %}\
        {% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.city }} {{ c.function.arguments | tojson }}\
        {% endfor %}{{ m.content or '' }}{% endfor %}{% if enable_thinking %} think{% endif %}";
    let template = ChatTemplate::new(source, "", "").unwrap();
    let mut chat: Chat = Chat::new(vec![Message::new("user", "hi ")]);
    assert_eq!(template.render(&chat).unwrap(), "hi ");
    let call = serde_json::json!({
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Köln\"}"}}],
    });
    chat.messages.push(serde_json::from_value(call).unwrap());
    chat.tools.push(serde_json::json!({"type": "function", "function": {"name": "weather"}}));
    chat.variables.insert("enable_thinking".into(), Json::Bool(true));
    assert_eq!(template.render(&chat).unwrap(), "weather hi Köln {\"city\": \"Köln\"} think");
    assert!(template.takes_tools());
}

#[test]
fn some_templates_expect_tools_in_the_systems_message() {
    let source = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\
        {% if message['role'] == 'system' and message['tools'] %}<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}{% endfor %}";
    let template = ChatTemplate::new(source, "", "").unwrap();
    let mut chat = Chat::new(vec![Message::new("user", "hi")]);
    assert_eq!(template.render(&chat).unwrap(), "<|user|>hi");
    chat.tools.push(serde_json::json!({"type": "function", "function": {"name": "f"}}));
    assert_eq!(template.render(&chat).unwrap(), "<|system|><|tool|>[{\"name\":\"f\"}]<|/tool|><|user|>hi");
    chat.messages.insert(0, Message::new("system", "Be kind."));
    assert_eq!(template.render(&chat).unwrap(), "<|system|>Be kind.<|tool|>[{\"name\":\"f\"}]<|/tool|><|user|>hi");
    assert!(!ChatTemplate::new("{{ messages }}", "", "").unwrap().takes_tools());
}
